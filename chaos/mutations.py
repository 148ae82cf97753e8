"""Faults put into the product on purpose, only in child processes: a harness that cannot fail proves nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import Offset, ProducerRecord, Transaction, translate
from rollmill.runtime.stream.batch_processor import BatchProcessor, PreparedOutputs
from rollmill.runtime.stream.task import Task

MUTATION = "CHAOS_MUTATION"


class Mutation(StrEnum):
    UNAWAITED_SENDS = "unawaited-sends"
    """Transactions are committed without checking whether their records were sent."""
    NO_CHANGELOG = "no-changelog"
    """State is kept in memory only."""
    NO_FENCING = "no-fencing"
    """Every process has its own transactional id, and none checks who owns the task."""


def apply(name: str) -> None:
    """Change this process. Raises ValueError for an unknown name."""
    changes: dict[Mutation, Callable[[], None]] = {
        Mutation.UNAWAITED_SENDS: _ignore_sends,
        Mutation.NO_CHANGELOG: _drop_changelog,
        Mutation.NO_FENCING: _disable_fencing,
    }
    changes[Mutation(name)]()


def _replace(owner: type, name: str, value: object) -> None:
    setattr(owner, name, value)


def _ignore_sends() -> None:
    async def run(
        self: Transaction,
        records: Sequence[ProducerRecord],
        offsets: Mapping[TopicPartition, Offset] | None,
        group_id: str,
    ) -> list[int]:
        producer = self._producer
        try:
            await producer.begin_transaction()
            futures = [
                await producer.send(r.topic, r.value, r.key, partition=r.partition, headers=list(r.headers))
                for r in records
            ]
            if offsets:
                await producer.send_offsets_to_transaction(dict(offsets), group_id)
            await producer.commit_transaction()
        except Exception as error:
            raise translate(error) from error
        return [0 if future.exception() else future.result().offset for future in futures]

    _replace(Transaction, "run", run)


def _drop_changelog() -> None:
    original: Callable[..., PreparedOutputs] = BatchProcessor._prepared

    def prepared(self: BatchProcessor[Any], *arguments: Any) -> PreparedOutputs:
        found, changelog = original(self, *arguments), self._identity.changelog.topic
        return replace(found, records=[record for record in found.records if record.topic != changelog])

    _replace(BatchProcessor, "_prepared", prepared)


def _disable_fencing() -> None:
    producer: Callable[..., AIOKafkaProducer] = KafkaClients.producer

    def unique(self: KafkaClients, transactional_id: str | None = None, **options: Any) -> AIOKafkaProducer:
        named = None if transactional_id is None else f"{transactional_id}.{uuid.uuid4().hex}"
        return producer(self, named, **options)

    async def never_refuse(_self: Task[Any]) -> None:
        return None

    _replace(KafkaClients, "producer", unique)
    _replace(Task, "_refuse_if_superseded", never_refuse)
