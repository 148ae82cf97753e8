"""Kafka in memory answers as Apache Kafka does: each test runs on both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, OutOfOrderSequenceNumber, ProducerFenced

from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.transaction import abandon
from rollmill.settings import KafkaSettings
from rollmill.testing.memory_kafka import MemoryBroker, MemoryKafkaClients, NetworkLink
from rollmill.topics import Partitioning, Topic

pytestmark = pytest.mark.kafka

NARROW = 1000
TOPIC = Topic(
    "words",
    "word",
    None,
    "",
    "bytes",
    Partitioning.SINGLE,
    10_000,
    ("test",),
    ("test",),
    "words",
    {"max.message.bytes": str(NARROW)},
)


@dataclass(frozen=True)
class Place:
    """Clients of one of the two, and a topic of one partition."""

    clients: KafkaClients
    words: TopicPartition
    prefix: str
    stack: AsyncExitStack

    async def producer(self) -> Any:
        """All of one transactional id."""
        made = self.clients.producer(f"{self.prefix}owner")
        await made.start()
        self.stack.push_async_callback(abandon, made)
        return made

    async def consumer(self) -> Any:
        made = self.clients.consumer(group_id=f"{self.prefix}group", reset="earliest")
        await made.start()
        self.stack.push_async_callback(stop_consumer, made)
        made.assign([self.words])
        await made.seek_to_beginning(self.words)
        return made

    async def send(self, producer: Any, value: bytes) -> int:
        future = await producer.send(self.words.topic, value, b"k", partition=0)
        return int((await asyncio.wait_for(future, 20)).offset)

    async def read_to(self, consumer: Any, end: int) -> list[bytes]:
        """Committed values until the position is ``end``."""
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while await consumer.position(self.words) < end:
                for records in (await consumer.getmany(self.words, timeout_ms=100)).values():
                    found += [record.value for record in records]
        assert await consumer.position(self.words) == end
        return found

    async def end(self, consumer: Any) -> int:
        return int((await consumer.end_offsets([self.words]))[self.words])


@pytest.fixture(params=["memory", "apache"])
async def place(request: pytest.FixtureRequest, topic_prefix: str) -> AsyncIterator[Place]:
    settings = KafkaSettings(prefix=topic_prefix, transaction_timeout_ms=10_000)
    words = TopicPartition(TOPIC.full_name(topic_prefix), 0)
    clients: KafkaClients = MemoryKafkaClients(settings, MemoryBroker({words.topic: NARROW}), NetworkLink())
    if request.param == "apache":
        kafka: EmbeddedKafka = request.getfixturevalue("kafka_broker")
        settings = settings.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
        await apply_topics(settings, [TOPIC])
        clients = KafkaClients(settings)
    async with AsyncExitStack() as stack:
        yield Place(clients, words, topic_prefix, stack)


async def test_a_reader_sees_what_is_committed_and_ends_where_a_transaction_is_open(place: Place) -> None:
    producer, consumer = await place.producer(), await place.consumer()
    await producer.begin_transaction()
    assert [await place.send(producer, b"a"), await place.send(producer, b"b")] == [0, 1]
    assert await place.end(consumer) == 0
    await producer.commit_transaction()
    await producer.begin_transaction()
    assert await place.send(producer, b"aborted") == 3
    await producer.abort_transaction()
    await producer.begin_transaction()
    assert await place.send(producer, b"open") == 5
    assert await place.end(consumer) == 5
    assert await place.read_to(consumer, 5) == [b"a", b"b"]


async def test_a_poll_that_ends_at_its_limit_stops_before_the_marker(place: Place) -> None:
    producer, consumer = await place.producer(), await place.consumer()
    await producer.begin_transaction()
    for value in (b"a", b"b"):
        await place.send(producer, value)
    await producer.commit_transaction()
    async with asyncio.timeout(20):
        while not await consumer.getmany(place.words, timeout_ms=100, max_records=2):
            pass
    assert await consumer.position(place.words) == 2
    assert await place.read_to(consumer, 3) == []
    assert consumer.highwater(place.words) == 3


async def test_a_successor_aborts_and_fences(place: Place) -> None:
    old, consumer = await place.producer(), await place.consumer()
    await old.begin_transaction()
    await place.send(old, b"old")
    await old.send_offsets_to_transaction({place.words: 7}, f"{place.prefix}group")
    new = await place.producer()
    with pytest.raises(ProducerFenced):
        await place.send(old, b"zombie")
    with pytest.raises((AssertionError, ProducerFenced)):
        await old.commit_transaction()
    await new.begin_transaction()
    await place.send(new, b"new")
    await new.commit_transaction()
    assert await place.read_to(consumer, 4) == [b"new"]
    assert await consumer.committed(place.words) is None


async def test_an_idle_producer_learns_of_its_successor_at_the_first_send(place: Place) -> None:
    old = await place.producer()
    await place.producer()
    await old.begin_transaction()
    with pytest.raises(ProducerFenced):
        await place.send(old, b"zombie")


async def test_offsets_count_once_their_transaction_is_committed(place: Place) -> None:
    producer, consumer = await place.producer(), await place.consumer()
    for offset, ending in ((3, producer.abort_transaction), (5, producer.commit_transaction)):
        await producer.begin_transaction()
        await place.send(producer, b"a")
        await producer.send_offsets_to_transaction({place.words: offset}, f"{place.prefix}group")
        await ending()
    async with asyncio.timeout(20):
        while await consumer.committed(place.words) is None:  # noqa: ASYNC110  # the broker shows it a moment later
            await asyncio.sleep(0.02)
    assert await consumer.committed(place.words) == 5


async def test_a_transaction_commits_without_the_send_that_failed_and_its_producer_is_broken(place: Place) -> None:
    producer, consumer = await place.producer(), await place.consumer()
    await producer.begin_transaction()
    await place.send(producer, b"good")
    with pytest.raises(MessageSizeTooLargeError):
        await place.send(producer, random.Random(1).randbytes(5000))  # noqa: S311  # only incompressible
    with pytest.raises(OutOfOrderSequenceNumber):
        await place.send(producer, b"after")
    await producer.commit_transaction()
    assert await place.read_to(consumer, 2) == [b"good"]
