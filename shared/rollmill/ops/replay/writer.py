"""The one producer of a replay, and a task of a stage run without a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer

from rollmill.codec import Headers
from rollmill.errors import RetryableError
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import ProducerRecord, Transaction, TransactionFailedError, stop_producer
from rollmill.runtime.stream.batch_processor import BatchProcessor, TransactionBatch
from rollmill.runtime.stream.changelog import POSITION, Position
from rollmill.runtime.stream.processor import InputRecord, Processor, TaskContext
from rollmill.runtime.stream.task_identity import task_identity
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.topics import Topic

DEADLINE_SECONDS = 20.0
MAX_UNWRITTEN = 16 * 2**20
"""Output bytes of one transaction, about."""
MAX_INPUTS = 2000


@dataclass(frozen=True)
class Writer:
    """Writes to the new prefix only."""

    settings: KafkaSettings
    producer: AIOKafkaProducer
    claims: ClaimCheck

    async def write(self, records: Sequence[ProducerRecord]) -> list[int]:
        """One transaction; returns the offset of each record. Raises RetryableError, FencedError."""
        foreign = [record.topic for record in records if not record.topic.startswith(self.settings.prefix)]
        if foreign:
            raise ValueError(f"a replay into {self.settings.prefix} never writes to {foreign[0]}")
        try:
            kept = await self.claims.store_all(records)
            return await Transaction(self.producer, DEADLINE_SECONDS).run(kept, None, "") if kept else []
        except TransactionFailedError as error:
            raise RetryableError(f"the replay failed: {error}; start it again into another prefix") from error

    def record(self, topic: Topic, partition: int, key: bytes, value: bytes, headers: Headers = ()) -> ProducerRecord:
        return ProducerRecord(topic.full_name(self.settings.prefix), partition, key, value, headers)


@asynccontextmanager
async def open_writer(settings: KafkaSettings) -> AsyncIterator[Writer]:
    producer = KafkaClients(settings).producer(f"{settings.prefix}replay")
    await producer.start()
    try:
        yield Writer(settings, producer, ClaimCheck.of(settings))
    finally:
        await stop_producer(producer)


@dataclass
class TaskDriver:
    """One task of a stage: fed record by record; outputs, changelog and position are written as the engine does."""

    stage: Processor[Any, Any]
    number: int
    settings: ServiceSettings
    writer: Writer
    positions: dict[str, int] = field(default_factory=dict)
    """Next input offset by ``topic/partition``."""

    def __post_init__(self) -> None:
        self._identity = task_identity(self.stage, self.number, self.settings)
        self._processor: BatchProcessor[Any] = BatchProcessor(self.stage, self._identity, self.settings)
        self._batch = TransactionBatch()

    async def feed(self, record: InputRecord) -> None:
        slot = f"{record.topic.name}/{record.partition}"
        self._processor.process(self._batch, record, slot, self.stage.inputs.index(record.topic))
        self.positions[slot] = max(self.positions.get(slot, 0), record.offset + 1)
        if self._batch.size > MAX_UNWRITTEN or self._batch.inputs.total() >= MAX_INPUTS:
            await self.flush()
        await asyncio.sleep(0)  # lets the fetching of further records run

    async def punctuate(self, now: float) -> list[tuple[ProducerRecord, int]]:
        """Run the stage's `punctuate` at event time ``now``; returns its outputs, with offsets."""
        await self.flush()
        context = TaskContext(now, self.number, dict(self.positions), caught_up=True, keeps_up=True)
        self._processor.punctuate(self._batch, context)
        return await self.flush()

    async def close(self) -> None:
        """Commit the rest; nothing is fed any more."""
        await self.flush()
        self._processor.close()

    async def flush(self) -> list[tuple[ProducerRecord, int]]:
        """Write and commit everything since the last flush; returns the outputs, with offsets."""
        batch, self._batch = self._batch, TransactionBatch()
        if not (batch.records or batch.inputs):
            return []
        budget = self._processor.budget
        position = Position(dict(self.positions), budget.level, budget.keys)
        changelog = self._identity.changelog
        last = ProducerRecord(changelog.topic, changelog.partition, POSITION.encode(), position.encode())
        offsets = await self.writer.write([*batch.records, last])
        self._processor.settle(position, committed=True)
        return list(zip(batch.records, offsets, strict=False))
