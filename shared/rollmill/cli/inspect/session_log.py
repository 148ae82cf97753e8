"""The events of one session from Kafka, and the builder's trajectories of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.cli.inspect.event_file import EventsRead
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import CompletionEvent, Trajectory
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT, COMPLETIONS, Topic, partition_of

POLL_MS = 200


async def read_session(settings: KafkaSettings, session_id: str) -> tuple[EventsRead, tuple[Trajectory, ...]]:
    """Reads the partition of the session's key in ``completions`` and ``built``, up to their ends as they are now.

    Raises InvalidInputError where the topics are not there.
    """
    problems: list[str] = []
    partitions = await _partitions_of_key(settings, session_id)
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        values = partial(_values, consumer, ClaimCheck.of(settings), session_id, problems)
        events: list[CompletionEvent] = [item async for item in values(COMPLETIONS, partitions[COMPLETIONS])]
        built: list[Trajectory] = [item async for item in values(BUILT, partitions[BUILT])]
    return EventsRead(tuple(events), tuple(problems)), tuple(built)


async def _partitions_of_key(settings: KafkaSettings, session_id: str) -> dict[Topic, TopicPartition]:
    """The partitions of a key, among as many as the broker says that the topics have."""
    names = {topic.full_name(settings.prefix): topic for topic in (COMPLETIONS, BUILT)}
    counts = await _partition_counts(settings, list(names))
    missing = [name for name in names if not counts.get(name)]
    if missing:
        raise InvalidInputError(
            f"{settings.bootstrap_servers} has no topic {' and no topic '.join(missing)}; is --prefix right?"
        )
    key = session_id.encode()
    return {topic: TopicPartition(name, partition_of(key, counts[name])) for name, topic in names.items()}


async def _partition_counts(settings: KafkaSettings, names: list[str]) -> dict[str, int]:
    admin = KafkaClients(settings).admin()
    await admin.start()
    try:
        return {item["topic"]: len(item["partitions"]) for item in await admin.describe_topics(names)}
    finally:
        await admin.close()


async def _values(
    consumer: AIOKafkaConsumer,
    claims: ClaimCheck,
    session_id: str,
    problems: list[str],
    topic: Topic,
    partition: TopicPartition,
) -> AsyncIterator[Any]:
    async for record in _records(consumer, partition):
        if record.key != session_id.encode():
            continue
        try:
            yield await claims.read(topic, record.value, tuple(record.headers))
        except PoisonRecordError as error:
            problems.append(f"{topic.name}, partition {record.partition}, offset {record.offset}: {error}")


async def _records(
    consumer: AIOKafkaConsumer, partition: TopicPartition
) -> AsyncIterator[ConsumerRecord[bytes, bytes]]:
    consumer.assign([partition])
    await consumer.seek_to_beginning(partition)
    ends = await consumer.end_offsets([partition])
    # An empty poll is progress, too: it moves the position past the markers of transactions.
    while await consumer.position(partition) < ends[partition]:
        for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
            for record in records:
                yield record
