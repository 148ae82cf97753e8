"""The stage engine on Apache Kafka: exactly once, fencing, refusals, poison, limits, restore."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from rollmill.errors import FatalError, FencedError, PoisonRecordError
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream import InputRecord, OutputRecord, Outputs, Processor, StateUpdate, StateView, TaskLocal
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task import Task
from rollmill.runtime.stream.task_identity import task_identity
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings
from rollmill.testing.topic_log import dead_letter_info, produce, read
from rollmill.topics import DEAD_LETTERS, OUTCOMES, Partitioning, Topic, changelog, partition_of

pytestmark = pytest.mark.kafka

INPUT = Topic("in", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "words")
OUTPUT = Topic("out", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "counts")
STATE = changelog("counter", Partitioning.SHARED)
# The broker refuses what the registry lets through: the case of a refusal that only the broker sees.
NARROW = {"max.message.bytes": "2000"}
TOPICS = (INPUT, replace(OUTPUT, config=NARROW), STATE, DEAD_LETTERS, OUTCOMES)


class Counter(Processor[int, TaskLocal]):
    """Counts words; ``end`` forgets one, ``bad`` is poison, ``bug`` a mistake of the stage, ``huge`` is refused."""

    name = "counter"
    inputs = (INPUT,)
    state_topic = STATE

    def task_local(self) -> TaskLocal:
        return TaskLocal()

    def process(self, state: StateView[int], record: InputRecord, _local: TaskLocal) -> Outputs:
        word = (record.value or b"").decode()
        if word == "bad":
            raise PoisonRecordError("bad_word", "this word is never counted")
        if word == "bug":
            raise KeyError(word)
        count = (state.get(word) or 0) + 1
        padding = random.Random(1).randbytes(5000) if word == "huge" else b""  # noqa: S311  # only incompressible
        emit = OutputRecord(OUTPUT, word, f"{word}={count}".encode() + padding)
        if word.startswith("end"):
            return Outputs(records=(emit,), deletes=(word[3:],))
        return Outputs(records=(emit,), updates=(StateUpdate(word, b"+"),))

    def apply(self, _key: str, value: int | None, _payload: bytes, _local: TaskLocal) -> int:
        return (value or 0) + 1


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> ServiceSettings:
    made = ServiceSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=1,
        transaction_timeout_ms=10_000,
        deadline_seconds=5,
        poll_ms=20,
        dead_letter_limit=5,
    )
    await apply_topics(made, TOPICS)
    return made


def make_task(settings: ServiceSettings) -> Task[int]:
    stage = Counter()
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), Metrics("counter"), Health())
    return Task(stage, task_identity(stage, 0, settings), tools)


@asynccontextmanager
async def running(settings: ServiceSettings) -> AsyncIterator[tuple[Task[int], asyncio.Event, asyncio.Task[None]]]:
    task, stop = make_task(settings), asyncio.Event()
    job = asyncio.create_task(task.run(stop))
    try:
        yield task, stop, job
    finally:
        stop.set()
        with suppress(FatalError, asyncio.CancelledError):
            await job


async def send(settings: ServiceSettings, *words: str) -> None:
    await produce(settings, INPUT, [("k", word.encode()) for word in words], headers=())


async def outputs(settings: ServiceSettings, count: int) -> list[bytes]:
    return [record.value for record in await read(settings, OUTPUT, count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the state changes inside the task, which has no event for it
            await asyncio.sleep(0.01)


async def test_counts_go_on_after_a_restart_each_once(settings: ServiceSettings) -> None:
    await send(settings, "a", "b", "a")
    async with running(settings):
        assert await outputs(settings, 3) == [b"a=1", b"b=1", b"a=2"]
    await send(settings, "a", "enda", "a")
    async with running(settings) as (task, _, _):
        assert await outputs(settings, 6) == [b"a=1", b"b=1", b"a=2", b"a=3", b"enda=1", b"a=1"]
        await until(lambda: dict(task.processor.state.items()) == {"a": 1, "b": 1})


async def test_a_cancelled_task_neither_loses_nor_doubles(settings: ServiceSettings) -> None:
    await send(settings, *["w"] * 200)
    for _ in range(4):
        task, stop = make_task(settings), asyncio.Event()
        job = asyncio.create_task(task.run(stop))
        await until(lambda: task.processor.state.get("w") is not None)  # noqa: B023
        job.cancel()
        with suppress(asyncio.CancelledError):
            await job
    async with running(settings):
        assert await outputs(settings, 200) == [f"w={n}".encode() for n in range(1, 201)]


# B103
async def test_poison_is_set_aside_with_its_source_and_the_next_is_processed(settings: ServiceSettings) -> None:
    await send(settings, "a", "bad", "bug", "b")
    async with running(settings):
        assert await outputs(settings, 2) == [b"a=1", b"b=1"]
        letters = await read(settings, DEAD_LETTERS, 2)
    infos = [dead_letter_info(letter) for letter in letters]
    assert [(info.reason, info.offset, info.topic) for info in infos] == [
        ("bad_word", 1, "in"),
        ("stage_error", 2, "in"),
    ]
    assert [letter.value for letter in letters] == [b"bad", b"bug"]


async def test_a_refused_send_is_never_committed_and_only_its_record_is_set_aside(settings: ServiceSettings) -> None:
    await send(settings, "a", "huge", "b", "a")
    async with running(settings):
        assert await outputs(settings, 3) == [b"a=1", b"b=1", b"a=2"]
        letters = await read(settings, DEAD_LETTERS, 1)
    info = dead_letter_info(letters[0])
    assert (info.reason, info.offset) == ("outputs_refused", 1)


async def test_a_bad_deploy_stops_instead_of_draining_the_topic(settings: ServiceSettings) -> None:
    bugs = [(f"k{number}", b"bug") for number in range(8)]
    await produce(settings, INPUT, bugs, headers=())
    for sources in ("6 x stage_error .first at in/0@0", "1 x stage_error .first at in/0@5"):  # survives a crash loop
        with pytest.raises(FatalError, match=f"more than 5 dead letters.*{sources}"):
            await make_task(settings).run(asyncio.Event())
        assert len(await read(settings, DEAD_LETTERS, 5)) == 5  # nt06: committed, so that they can be looked at
    await send(settings, "a")
    async with running(settings.model_copy(update={"dead_letter_limit": 10})):
        assert await outputs(settings, 1) == [b"a=1"]
        assert len(await read(settings, DEAD_LETTERS, 8)) == 8


async def test_f2_a_task_over_its_limit_leaves_the_other_partitions_running(settings: ServiceSettings) -> None:
    two = settings.model_copy(update={"prefix": f"{settings.prefix}two.", "partitions": 2})
    await apply_topics(two, TOPICS)
    tools = TaskTools(two, KafkaClients(two), SystemClock(), Metrics("counter"), Health())
    stop = asyncio.Event()
    job = asyncio.create_task(run_stages([Counter()], tools, stop))
    keys = [f"k{number}" for number in range(40)]
    bad, good = ([key for key in keys if partition_of(key.encode(), 2) == number] for number in range(2))
    await produce(two, INPUT, [(key, b"bug") for key in bad[:8]], headers=())
    await read(two, DEAD_LETTERS, 5)
    await produce(two, INPUT, [(good[0], b"a")], headers=())
    assert [record.value for record in await read(two, OUTPUT, 1)] == [b"a=1"]
    assert not job.done()
    stop.set()
    with pytest.raises(FatalError, match="more than 5 dead letters"):
        await job


async def test_f2_bad_records_of_clients_never_stop_a_task(settings: ServiceSettings) -> None:
    await produce(settings, INPUT, [(f"k{number}", b"bad") for number in range(200)], headers=())
    await send(settings, *["bug"] * 50, "a")  # of one key, which counts once
    async with running(settings):
        assert await outputs(settings, 1) == [b"a=1"]
        assert len(await read(settings, DEAD_LETTERS, 250)) == 250


async def test_nt01_a_header_without_a_value_breaks_nothing(settings: ServiceSettings) -> None:
    null = ("traceparent", None)
    await produce(settings, INPUT, [("k", b"bad"), ("k", b"a")], headers=(null, ("x", b"y")))
    async with running(settings):
        assert await outputs(settings, 1) == [b"a=1"]
        (letter,) = await read(settings, DEAD_LETTERS, 1)
    assert letter.headers[:2] == (null, ("x", b"y"))


async def test_a_superseded_owner_exits_fenced_and_stays_out(settings: ServiceSettings) -> None:
    async with running(settings) as (_, _, old):
        await send(settings, "a")
        await outputs(settings, 1)
        async with running(settings) as (new, _, _):
            await until(lambda: new.processor.state.get("a") == 1)
            await send(settings, "a")
            with pytest.raises(FencedError) as fenced:
                await old
            assert fenced.value.exit_code == 75
            assert await outputs(settings, 2) == [b"a=1", b"a=2"]


async def test_a_lost_broker_connection_is_survived(settings: ServiceSettings, kafka_broker: EmbeddedKafka) -> None:
    async with running(settings) as (task, _, _):
        await send(settings, "a")
        await outputs(settings, 1)
        await kafka_broker.restart()
        await send(settings, "a")
        assert await outputs(settings, 2) == [b"a=1", b"a=2"]
        assert task.processor.state.get("a") == 2


async def test_deleted_unread_records_stop_the_start_with_both_numbers(settings: ServiceSettings) -> None:
    await send(settings, "a")
    async with running(settings):
        await outputs(settings, 1)
    await send(settings, "b", "c", "d")
    admin = KafkaClients(settings).admin()
    await admin.start()
    try:
        where = TopicPartition(INPUT.full_name(settings.prefix), 0)
        await admin.delete_records({where: RecordsToDelete(before_offset=3)})
    finally:
        await admin.close()
    with pytest.raises(FatalError, match="is 1, but the log starts at 3: 2 records"):
        await make_task(settings).run(asyncio.Event())


async def test_a_lingering_task_leaves_at_once_and_its_successor_takes_what_gathered(settings: ServiceSettings) -> None:
    lingering = settings.model_copy(update={"linger_ms": 600_000})
    async with running(lingering) as (_, stop, job):
        await send(settings, "a")
        await read(settings, OUTPUT, lambda records: len(records) == 1)
        await send(settings, "b", "a")
        stop.set()
        await asyncio.wait_for(job, 10)
    async with running(lingering):
        records = await read(settings, OUTPUT, lambda records: len(records) == 3)
    assert [record.value for record in records] == [b"a=1", b"b=1", b"a=2"]
