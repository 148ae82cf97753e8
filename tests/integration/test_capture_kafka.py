"""Capture as a process, on Apache Kafka, between the stock `openai` client and an engine that plays answers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from openai import APIError, AsyncOpenAI, NotFoundError
from openai.types.chat import ChatCompletionMessageParam
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollmill.codec import JSON, encode
from rollmill.errors import EXIT_DRAINED
from rollmill.models import (
    CallStatus,
    CompletionRecord,
    PolicyAnnouncement,
    PolicyVersion,
    SessionClosed,
    SessionOpened,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.topics import COMPLETIONS, POLICIES
from rollmill_capture.http.server import serve
from rollmill_capture.settings import CaptureSettings

pytestmark = pytest.mark.kafka

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
WAIT = 30.0
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "2+2?"}]
IDS = [21, 22, 23, 24, 901]


@dataclass(frozen=True)
class Engine:
    """Plays the file that the model's name says, whole or as a stream, once ``open`` is set."""

    open: asyncio.Event
    asked: asyncio.Event
    stop: asyncio.Event
    url: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = orjson.loads(await Request(scope, receive).body())["model"]
        self.asked.set()
        await self.open.wait()
        await _answer(WIRE / name)(scope, receive, send)


def _answer(path: Path) -> Response:
    if path.suffix == ".sse":
        return StreamingResponse(_pieces(path.read_bytes()), media_type="text/event-stream")
    return Response(path.read_bytes(), media_type="application/json")


async def _pieces(raw: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), 100):
        yield raw[start : start + 100]


@asynccontextmanager
async def playing_engine() -> AsyncIterator[Engine]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = Engine(asyncio.Event(), asyncio.Event(), asyncio.Event(), url)
        engine.open.set()
        running = asyncio.create_task(serve(engine, listener, CaptureSettings(), engine.stop))
        yield engine
        engine.stop.set()
        await asyncio.wait_for(running, WAIT)


@dataclass(frozen=True)
class Capture:
    url: str
    process: Process

    def openai(self, session_id: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/sessions/{session_id}/v1", api_key="none", max_retries=0)

    async def open(self, **spec: Any) -> dict[str, Any]:
        return await self._post("/v1/sessions", spec, 201)

    async def close(self, session_id: str, **body: Any) -> dict[str, Any]:
        return await self._post(f"/v1/sessions/{session_id}/close", body, 200)

    async def _post(self, path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def drained(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), WAIT)


@asynccontextmanager
async def running_capture(settings: KafkaSettings, engine: Engine) -> AsyncIterator[Capture]:
    """Capture as its own process, from its first word that it listens to its end."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmill_capture", env=_environment(settings, engine.url, port), stderr=PIPE
    )
    try:
        log = await asyncio.wait_for(_read_until(process, b"capture listens"), WAIT)
        reading = asyncio.create_task(_read_until(process, None))
        assert b"error" not in log, log.decode()
        try:
            yield Capture(f"http://127.0.0.1:{port}", process)
        except BaseException as error:
            error.add_note(f"capture's exit code: {process.returncode}, its log:\n{await _ended(process, reading)}")
            raise
        await _ended(process, reading)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ended(process: Process, reading: asyncio.Task[bytes]) -> str:
    """The rest of its log."""
    if process.returncode is None:
        process.kill()
    return (await asyncio.wait_for(reading, WAIT)).decode("utf-8", "replace")


def _environment(settings: KafkaSettings, upstream: str, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": str(settings.partitions),
        "ROLLMILL_PORT": str(port),
        "ROLLMILL_UPSTREAM": upstream,
        "ROLLMILL_PROBE": "false",  # the engine's events are for the calls of the tests
    }


async def _read_until(process: Process, words: bytes | None) -> bytes:
    assert process.stderr is not None
    seen = b""
    async for line in process.stderr:
        seen += line
        if words is not None and words in line:
            return seen
    if words is not None:
        raise AssertionError(f"capture ended early: {seen.decode()}")
    return seen


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(made)
    return made


async def events_of(settings: KafkaSettings, session_id: str) -> list[Any]:
    """What the log holds of a session, in order."""
    found: list[Any] = []

    def take(key: str, event: Any) -> None:
        if key == session_id:
            found.append(event)

    def refuse(key: str, error: Exception) -> None:
        raise AssertionError(f"{key}: {error}")

    reader, stop = GlobalTable(KafkaClients(settings), settings, COMPLETIONS, take, refuse), asyncio.Event()
    running = asyncio.create_task(reader.run(stop))
    await asyncio.wait_for(reader.caught_up(), WAIT)
    stop.set()
    await running
    return found


def completions(events: list[Any]) -> list[CompletionRecord]:
    return [event for event in events if isinstance(event, CompletionRecord)]


async def test_the_stock_client_talks_to_capture_and_the_log_has_the_tokens(settings: KafkaSettings) -> None:
    async with playing_engine() as engine, running_capture(settings, engine) as capture:
        opened = await capture.open(session_id="s1", task_id="t1", group_id="g1", group_size=8)
        assert opened["environment"]["OPENAI_BASE_URL"] == f"{capture.url}/sessions/s1/v1"
        async with capture.openai("s1") as client:
            whole = await client.chat.completions.create(model="vllm_chat_nonstream_token_ids.json", messages=QUESTION)
            stream = await client.chat.completions.create(
                model="vllm_chat_stream_basic.sse", messages=QUESTION, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert (whole.choices[0].message.content, text) == ("It is 4.", "It is 4.")
        assert (await capture.close("s1", reward=1.0))["state"] == "closed"
        assert await capture.drained() == EXIT_DRAINED
    first, *calls, last = await events_of(settings, "s1")
    assert isinstance(first, SessionOpened)
    assert (first.spec.task_id, first.spec.group_size) == ("t1", 8)
    assert isinstance(last, SessionClosed)
    assert last.reward == 1.0
    assert [call.choices[0].token_ids.tolist() for call in calls] == [IDS, IDS]
    assert [call.choices[0].trainable for call in calls] == [True, True]


async def test_the_stock_client_reads_what_it_can_and_is_told_of_what_it_cannot(settings: KafkaSettings) -> None:
    async with playing_engine() as engine, running_capture(settings, engine) as capture:
        await capture.open(session_id="s1")
        async with capture.openai("s1") as client:
            odd = await client.chat.completions.create(
                model="gateway_stream_keepalive_and_meta.sse", messages=QUESTION, stream=True
            )
            assert [chunk.choices[0].delta.content async for chunk in odd][1] == "It"
            for name in ("vllm_chat_stream_cut.sse", "gateway_stream_flat_error.sse", "gateway_200_not_sse.sse"):
                with pytest.raises(APIError):
                    await _read_out(client, name)
        async with capture.openai("nobody") as client:
            with pytest.raises(NotFoundError, match="POST /v1/sessions"):
                await client.chat.completions.create(model="any", messages=QUESTION)
        calls = completions(await events_of(settings, "s1"))
    assert [call.status for call in calls] == [CallStatus.OK, *[CallStatus.INCOMPLETE] * 3]


async def _read_out(client: AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(model=model, messages=QUESTION, stream=True)
    async for _ in stream:
        pass


async def test_replicas_and_a_restarted_one_share_the_sessions(settings: KafkaSettings) -> None:
    async with playing_engine() as engine:
        async with running_capture(settings, engine) as one, running_capture(settings, engine) as two:
            for number in range(3):
                await one.open(session_id=f"s{number}")
                async with two.openai(f"s{number}") as client:
                    await client.chat.completions.create(model="vllm_chat_nonstream_token_ids.json", messages=QUESTION)
            await two.close("s0", status="ERROR", error="gave up")
            assert [await one.drained(), await two.drained()] == [EXIT_DRAINED, EXIT_DRAINED]
        async with running_capture(settings, engine) as again:
            await again.close("s0", status="ERROR", error="gave up")
            async with httpx.AsyncClient(base_url=again.url) as http:
                assert (await http.post("/v1/sessions/s0/close", json={})).status_code == 409
                assert (await http.get("/v1/sessions/s1")).json()["state"] == "open"
    assert [event.type for event in await events_of(settings, "s0")] == [
        "session_opened",
        "completion",
        "session_closed",
    ]


async def test_an_announced_version_labels_the_calls_after_it(settings: KafkaSettings) -> None:
    version = PolicyVersion(1, 3)
    async with KafkaClients(settings).producer() as producer:
        value = encode(PolicyAnnouncement(version=version, at=1.0), JSON)
        await producer.send_and_wait(POLICIES.full_name(settings.prefix), value, b"policy")
    async with playing_engine() as engine, running_capture(settings, engine) as capture:
        await capture.open(session_id="s1")
        async with capture.openai("s1") as client:
            await client.chat.completions.create(model="vllm_chat_nonstream_token_ids.json", messages=QUESTION)
    (call,) = completions(await events_of(settings, "s1"))
    assert (call.policy.before, call.policy.after) == (version, version)


async def test_a_call_in_flight_at_shutdown_gets_its_reply_and_its_record(settings: KafkaSettings) -> None:
    async with playing_engine() as engine, running_capture(settings, engine) as capture:
        await capture.open(session_id="s1")
        engine.open.clear()
        async with capture.openai("s1") as client, asyncio.timeout(WAIT):
            reply = asyncio.create_task(_read_out(client, "vllm_chat_stream_basic.sse"))
            await engine.asked.wait()
            draining = asyncio.create_task(capture.drained())
            await _refuses_connections(capture)
            engine.open.set()
            await reply
        assert await draining == EXIT_DRAINED
    assert [call.status for call in completions(await events_of(settings, "s1"))] == [CallStatus.OK]


async def _refuses_connections(capture: Capture) -> None:
    """Wait until capture has stopped listening."""
    port = httpx.URL(capture.url).port
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
