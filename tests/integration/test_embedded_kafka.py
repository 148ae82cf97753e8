"""The embedded broker is a real one: it keeps its data, commits and aborts, and never outlives who started it."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.kafka.embedded.storage import DataDirectory, hold

pytestmark = pytest.mark.kafka

TEST_BROKER = BrokerConfig(test_mode=True, lock_seconds=0.1)


async def create_topic(address: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    await admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
    await admin.close()


@asynccontextmanager
async def transactional_producer(address: str, name: str) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=address, transactional_id=name, transaction_timeout_ms=10_000)
    await producer.start()
    yield producer
    await producer.stop()


async def send(address: str, topic: str, value: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=address)
    await producer.start()
    await producer.send_and_wait(topic, value, partition=0)
    await producer.stop()


async def committed_values(address: str, topic: str) -> list[bytes]:
    """All values up to the end, read_committed; aborted ones and markers take offsets too."""
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=address, isolation_level="read_committed", enable_auto_commit=False)
    await consumer.start()
    consumer.assign([partition])
    await consumer.seek_to_beginning(partition)
    end = (await consumer.end_offsets([partition]))[partition]
    values: list[bytes] = []
    while await consumer.position(partition) < end:
        values += [record.value for records in (await consumer.getmany(timeout_ms=500)).values() for record in records]
    await consumer.stop()
    return values


async def test_read_committed_sees_what_was_committed_and_nothing_else(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    address, topic = kafka_broker.bootstrap_servers, topic_prefix + "events"
    await create_topic(address, topic)
    async with transactional_producer(address, topic_prefix + "writer") as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted", partition=0)
        await producer.abort_transaction()
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"committed", partition=0)
        await producer.commit_transaction()
    assert await committed_values(address, topic) == [b"committed"]


async def test_data_and_address_survive_a_clean_stop_and_a_kill(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path / "kafka", TEST_BROKER)
    async with kafka:
        address = kafka.bootstrap_servers
        await create_topic(address, "events")
        await send(address, "events", b"before the stop")
        await kafka.restart()
        await send(address, "events", b"before the kill")
        await kafka.kill()
        assert not kafka.is_running
        await kafka.start()
        assert kafka.bootstrap_servers == address
        assert await committed_values(address, "events") == [b"before the stop", b"before the kill"]
    assert not kafka.is_running


async def test_a_second_broker_in_the_same_directory_is_refused(kafka_broker: EmbeddedKafka) -> None:
    second = EmbeddedKafka(kafka_broker.directory.root, TEST_BROKER)
    with pytest.raises(ConfigurationError, match="in use by a running broker"):
        await second.start()
    assert kafka_broker.is_running


PARENT = """
import asyncio, pathlib, signal, sys
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka

async def main():
    kafka = EmbeddedKafka(pathlib.Path(sys.argv[1]), BrokerConfig(test_mode=True))
    await kafka.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_broker_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "kafka")
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, directory.root, stdout=PIPE)
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    with pytest.raises(ConfigurationError, match="in use"):
        await hold(directory, patience=0.1)
    parent.kill()
    await parent.wait()
    # Java itself has the directory locked until it has ended.
    os.close(await hold(directory, patience=15))
