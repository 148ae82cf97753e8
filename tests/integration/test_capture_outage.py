"""Kafka goes away under load, and capture too: what a client saw end normally is in the log, and is counted once."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiokafka import TopicPartition
from starlette.requests import Request
from starlette.responses import JSONResponse

from rollmill.codec import decode
from rollmill.errors import EXIT_DRAINED
from rollmill.models import CallStatus, CompletionRecord, Disposition, SessionClosed, SessionOpened
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.processes import ServiceProcess, service_process
from rollmill.topics import COMPLETIONS, OUTCOMES
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_capture.http.server import serve
from rollmill_capture.settings import CaptureSettings

pytestmark = pytest.mark.kafka

WAIT = 60.0
SESSIONS_AT_WORK = 12


@dataclass
class Echo:
    """An engine whose reply is the number that it was asked for, as text and as token id."""

    url: str = ""
    asked: list[int] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear it to hold every reply back."""

    def __post_init__(self) -> None:
        self.open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = orjson.loads(await Request(scope, receive).body())
        number = int(body["messages"][-1]["content"])
        self.asked.append(number)
        await self.open.wait()
        await JSONResponse(_reply(number))(scope, receive, send)


def _reply(number: int) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": str(number)},
        "finish_reason": "stop",
        "token_ids": [number],
        "logprobs": {"content": [{"token": str(number), "logprob": -0.5}]},
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    return {"id": f"r{number}", "model": "echo", "prompt_token_ids": [1, 2], "choices": [choice], "usage": usage}


@asynccontextmanager
async def echoing() -> AsyncIterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine, stop = Echo(f"http://127.0.0.1:{listener.getsockname()[1]}"), asyncio.Event()
        running = asyncio.create_task(serve(engine, listener, CaptureSettings(), stop))
        yield engine
        stop.set()
        await running


@dataclass
class World:
    kafka: EmbeddedKafka
    settings: KafkaSettings
    engine: Echo
    spool: Path
    port: int = field(default_factory=free_port)
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def capture(self, **more: str) -> AsyncIterator[ServiceProcess]:
        environment = {
            "ROLLMILL_BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
            "ROLLMILL_PREFIX": self.settings.prefix,
            "ROLLMILL_PARTITIONS": str(self.settings.partitions),
            "ROLLMILL_PORT": str(self.port),
            "ROLLMILL_UPSTREAM": self.engine.url,
            "ROLLMILL_SPOOL_DIR": str(self.spool),
            "ROLLMILL_SPOOL_AFTER_SECONDS": "0.5",
            **more,
        }
        async with service_process("rollmill_capture", environment) as process:
            await process.wait_for_log(b"capture listens")
            yield process

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT, limits=limits) as http:
            yield http

    async def open(self, http: httpx.AsyncClient, session: str) -> None:
        (await http.post("/v1/sessions", json={"session_id": session})).raise_for_status()

    async def close(self, http: httpx.AsyncClient, session: str) -> None:
        (await http.post(f"/v1/sessions/{session}/close", json={})).raise_for_status()

    async def call(self, http: httpx.AsyncClient, session: str, number: int) -> None:
        """One call, and whether it ended normally."""
        body = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": str(number)}]}
        try:
            answer = await http.post(f"/sessions/{session}/v1/chat/completions", json=body)
        except httpx.HTTPError:
            self.failed.append(number)
            return
        (self.failed if answer.is_error else self.ended).append(number)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A broker of its own: the others' may not be killed."""
    async with EmbeddedKafka(tmp_path / "kafka", BrokerConfig(test_mode=True)) as kafka, echoing() as engine:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, prefix="outage.", partitions=4)
        await apply_topics(settings)
        yield World(kafka, settings, engine, tmp_path / "spool")


async def records_of(settings: KafkaSettings) -> list[Any]:
    """Everything in `completions`, in the order of its partitions."""
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        name = COMPLETIONS.full_name(settings.prefix)
        places = [TopicPartition(name, number) for number in range(settings.partitions)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        found: list[Any] = []
        while any([await consumer.position(place) < ends[place] for place in places]):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                found.extend(batch)
    return sorted(found, key=lambda record: (record.partition, record.offset))


def counted(settings: KafkaSettings, records: list[Any]) -> Counter[int]:
    """What the builder counts as captured, by token: it sees the log as it is, duplicates included."""
    stage = build_builder(BuilderSettings(partitions=settings.partitions)).stages[0]
    tasks: dict[int, MemoryTask[Any]] = {}
    for record in records:
        task = tasks.setdefault(record.partition, MemoryTask(stage, partition=record.partition))
        task.feed(COMPLETIONS, record.value, key=record.key.decode(), headers=tuple(record.headers))
    assert not any(task.dead_letters for task in tasks.values())
    outcomes: list[Any] = [emit.value for task in tasks.values() for emit in task.of(OUTCOMES)]
    sampled = sampled_tokens(records)
    found: Counter[int] = Counter()
    for outcome in outcomes:
        if outcome.disposition is Disposition.CAPTURED:
            for unit in outcome.units:
                found[sampled[unit.completion_id]] += unit.tokens
    return found


def sampled_tokens(records: list[Any]) -> dict[str, int]:
    """The one token of each call, by completion id."""
    calls: list[Any] = [event for event in map(event_of, records) if isinstance(event, CompletionRecord)]
    assert all(call.status is CallStatus.OK for call in calls)
    return {call.completion_id: int(call.choices[0].token_ids[0]) for call in calls}


def event_of(record: Any) -> Any:
    return decode(COMPLETIONS.model, record.value, tuple(record.headers))


async def test_calls_go_on_while_the_broker_is_away_and_nothing_is_lost_or_doubled(world: World) -> None:
    async with world.capture() as capture, world.client() as http, asyncio.timeout(3 * WAIT):
        sessions = [f"s{number}" for number in range(SESSIONS_AT_WORK)]
        await asyncio.gather(*(world.open(http, session) for session in sessions))
        stop = asyncio.Event()
        working = [asyncio.create_task(_work(world, http, session, stop)) for session in sessions]
        await _ended(world, 200)
        await world.kafka.kill()
        await _ended(world, len(world.ended) + 200)
        await world.open(http, "opened-without-kafka")
        await world.call(http, "opened-without-kafka", 900_000)
        await world.close(http, "opened-without-kafka")
        await world.kafka.start()
        await _ended(world, len(world.ended) + 200)
        stop.set()
        await asyncio.gather(*working)
        await asyncio.gather(*(world.close(http, session) for session in sessions))
        assert await capture.stop() == EXIT_DRAINED
    assert not world.failed
    records = await records_of(world.settings)
    events = [event_of(record) for record in records]
    assert counted(world.settings, records) == Counter(world.ended)
    assert Counter(world.engine.asked) == Counter(world.ended)
    for session in (*sessions, "opened-without-kafka"):
        mine = [event for event in events if event.session_id == session]
        assert isinstance(mine[0], SessionOpened)
        assert isinstance(mine[-1], SessionClosed)


async def _work(world: World, http: httpx.AsyncClient, session: str, stop: asyncio.Event) -> None:
    number = 1000 * (1 + int(session[1:]))
    while not stop.is_set():
        await world.call(http, session, number)
        number += 1


async def _ended(world: World, count: int) -> None:
    await _reached(lambda: len(world.ended) >= count)


async def test_capture_killed_with_a_full_spool_sends_it_at_its_next_start(world: World) -> None:
    async with asyncio.timeout(3 * WAIT):
        async with world.capture(ROLLMILL_SPOOL_BYTES=str(400_000)) as capture, world.client() as http:
            await world.open(http, "s1")
            await world.kafka.kill()
            for number in range(1, 1000):
                await world.call(http, "s1", number)
                # Once may be the call before, which gives its room back a moment after its reply.
                if world.failed[-3:] == [number - 2, number - 1, number]:
                    break
            asked = len(world.engine.asked)
            answer = await http.post(
                "/sessions/s1/v1/chat/completions",
                json={"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "77777"}]},
            )
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert len(world.engine.asked) == asked == len(world.ended) > 10
            await capture.kill()
        await world.kafka.start()
        async with world.capture() as capture, world.client() as http:
            await world.call(http, "s1", 500_000)
            await world.close(http, "s1")
            assert await capture.stop() == EXIT_DRAINED
    assert counted(world.settings, await records_of(world.settings)) == Counter(world.ended)


async def test_calls_in_flight_when_kafka_goes_find_the_room_that_was_kept_for_them(world: World) -> None:
    """Those that would have had none were refused while Kafka was well, and the engine never saw them."""
    calls = 100
    async with (
        asyncio.timeout(3 * WAIT),
        world.capture(ROLLMILL_SPOOL_BYTES=str(2_000_000)) as capture,
        world.client() as http,
    ):
        await asyncio.gather(*(world.open(http, f"s{number}") for number in range(4)))
        world.engine.open.clear()
        working = [asyncio.create_task(world.call(http, f"s{number % 4}", number + 1)) for number in range(calls)]
        await _reached(lambda: len(world.engine.asked) + len(world.failed) == calls)
        assert 10 < len(world.engine.asked) < 40
        admitted = Counter(world.engine.asked)
        await world.kafka.kill()
        world.engine.open.set()
        await asyncio.gather(*working)
        assert Counter(world.ended) == admitted
        assert not admitted & Counter(world.failed)
        await world.kafka.start()
        again, world.failed = world.failed, []
        while again:
            await world.call(http, "s0", again[-1])
            if not world.failed:
                again.pop()
            world.failed.clear()
        assert await capture.stop() == EXIT_DRAINED
    assert counted(world.settings, await records_of(world.settings)) == Counter(range(1, calls + 1))
    assert Counter(world.engine.asked) == Counter(range(1, calls + 1))


async def _reached(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the calls are the event
        await asyncio.sleep(0.01)


async def test_what_is_left_in_the_spool_at_sigterm_waits_for_the_next_start(world: World) -> None:
    async with asyncio.timeout(3 * WAIT):
        async with world.capture(ROLLMILL_DRAIN_SECONDS="6") as capture, world.client() as http:
            await world.open(http, "s1")
            await world.kafka.kill()
            await world.call(http, "s1", 1)
            await world.close(http, "s1")
            assert await capture.stop() == EXIT_DRAINED
            assert b"the next start sends them" in capture.log
        await world.kafka.start()
        async with world.capture() as capture, world.client() as http:
            assert (await http.get("/v1/sessions/s1")).json()["state"] == "closed"
            assert await capture.stop() == EXIT_DRAINED
    assert counted(world.settings, await records_of(world.settings)) == Counter([1])
