"""The table reader against Apache Kafka: it reads all, follows, and knows how far it has come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiokafka import AIOKafkaProducer

from rollmill.codec import JSON, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import PolicyAnnouncement, PolicyVersion
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.settings import KafkaSettings
from rollmill.topics import POLICIES

pytestmark = pytest.mark.kafka

WAIT = 20.0


@dataclass
class Table:
    """What a reader has seen, in order."""

    seen: list[tuple[str, PolicyAnnouncement | None]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def apply(self, key: str, value: PolicyAnnouncement | None) -> None:
        self.seen.append((key, value))

    def refuse(self, key: str, error: PoisonRecordError) -> None:
        self.refused.append((key, error.reason))

    @property
    def versions(self) -> list[int | None]:
        return [None if value is None else value.version.version for _, value in self.seen]


@asynccontextmanager
async def reading(settings: KafkaSettings, table: Table) -> AsyncIterator[GlobalTable]:
    reader = GlobalTable(KafkaClients(settings), settings, POLICIES, table.apply, table.refuse)
    stop = asyncio.Event()
    running = asyncio.create_task(reader.run(stop))
    try:
        yield reader
    finally:
        stop.set()
        await asyncio.wait_for(running, WAIT)


async def announce(producer: AIOKafkaProducer, settings: KafkaSettings, version: int) -> None:
    value = encode(PolicyAnnouncement(version=PolicyVersion(0, version), at=1.0), JSON)
    await producer.send_and_wait(POLICIES.full_name(settings.prefix), value, b"policy")


async def test_a_table_is_read_whole_and_followed(kafka_broker: EmbeddedKafka, topic_prefix: str) -> None:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(settings, [POLICIES])
    table, topic = Table(), POLICIES.full_name(topic_prefix)
    async with KafkaClients(settings).producer() as producer:
        await announce(producer, settings, 1)
        await producer.send_and_wait(topic, b"{not json", b"policy")
        await announce(producer, settings, 2)
        async with reading(settings, table) as reader, asyncio.timeout(WAIT):
            await reader.caught_up()
            assert table.versions == [1, 2]
            assert table.refused == [("policy", "malformed")]
            await announce(producer, settings, 3)
            await producer.send_and_wait(topic, None, b"policy")
            await reader.reached(await reader.end_offsets())
            assert table.versions == [1, 2, 3, None]


async def test_a_transactions_marker_does_not_hold_a_reader_back(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(settings, [POLICIES])
    table = Table()
    async with KafkaClients(settings).producer(f"{topic_prefix}announcer") as producer:
        async with producer.transaction():
            await announce(producer, settings, 7)
        async with reading(settings, table) as reader, asyncio.timeout(WAIT):
            await reader.caught_up()
            async with producer.transaction():
                await announce(producer, settings, 8)
            await reader.reached(await reader.end_offsets())
            assert table.versions == [7, 8]
