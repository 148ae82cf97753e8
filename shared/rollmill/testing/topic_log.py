"""Produce to and read from topics in tests: plain bytes in, committed records out, bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition

from rollmill.codec import DEAD_LETTER, JSON, Headers, decode, header
from rollmill.errors import PoisonRecordError
from rollmill.models import DeadLetterInfo
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.topics import Topic

TIMEOUT_SECONDS = 60.0
QUIET_POLLS = 3

JSON_HEADERS: Headers = (("content-type", JSON.encode()),)

KeyValue = tuple[str, bytes]
"""Key and value."""


async def produce(
    settings: KafkaSettings, topic: Topic, records: Iterable[KeyValue], *, headers: Headers = JSON_HEADERS
) -> None:
    """Send records by their keys and wait until all are acknowledged."""
    producer = KafkaClients(settings).producer()
    await producer.start()
    try:
        name = topic.full_name(settings.prefix)
        sends = [await producer.send(name, value, key.encode(), headers=list(headers)) for key, value in records]
        await asyncio.gather(*sends)
    finally:
        await producer.stop()


async def read(settings: KafkaSettings, topic: Topic, done: int | Callable[[list[Any]], bool]) -> list[ConsumerRecord]:
    """Committed records of all partitions, once there are ``done`` of them (or ``done`` returns True) and none have
    arrived for `QUIET_POLLS` polls. Raises TimeoutError after `TIMEOUT_SECONDS`.
    """
    enough = done if callable(done) else lambda found: len(found) >= done
    records: list[ConsumerRecord] = []
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        name = topic.full_name(settings.prefix)
        consumer.assign([TopicPartition(name, p) for p in range(topic.partitions(settings))])
        quiet = 0
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while quiet < QUIET_POLLS or not enough(records):
                found = await consumer.getmany(timeout_ms=100)
                quiet = 0 if found else quiet + 1
                for batch in found.values():
                    records += batch
    return records


async def read_all(settings: KafkaSettings, topic: Topic) -> list[Any]:
    """The decoded values of all records committed so far. Raises PoisonRecordError where one cannot be decoded."""
    found: list[Any] = []
    poison: list[PoisonRecordError] = []
    stop = asyncio.Event()
    reader = GlobalTable(
        KafkaClients(settings), settings, topic, lambda _, value: found.append(value), lambda _, e: poison.append(e)
    )
    reading = asyncio.create_task(reader.run(stop))
    await asyncio.wait_for(reader.caught_up(), TIMEOUT_SECONDS)
    stop.set()
    await reading
    if poison:
        raise poison[0]
    return found


def dead_letter_info(record: ConsumerRecord) -> DeadLetterInfo:
    """The header of a dead letter."""
    info: DeadLetterInfo = decode(DeadLetterInfo, header(record.headers, DEAD_LETTER), JSON_HEADERS)
    return info


@asynccontextmanager
async def running(settings: ServiceSettings, stages: Sequence[Processor[Any, Any]]) -> AsyncIterator[None]:
    """Run processors on the engine in this process, each with its own metrics; drained at the end of the block.

    Raises the exception that ended one of them.
    """
    clients, stop = KafkaClients(settings), asyncio.Event()
    tools = [TaskTools(settings, clients, SystemClock(), Metrics(stage.name), Health()) for stage in stages]
    work = [run_stages([stage], own, stop) for stage, own in zip(stages, tools, strict=True)]
    job = asyncio.gather(*work, return_exceptions=True)
    try:
        yield
    finally:
        stop.set()
        for failure in filter(None, await asyncio.wait_for(job, TIMEOUT_SECONDS)):
            raise failure
