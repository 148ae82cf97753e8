"""A thousand rollouts at once, an engine slow to accept and silent for long: nothing fails, nothing is retried."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rollmill.models import CallStatus, CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.server import BACKLOG, serve
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client

CALLS = 1024
WAIT = 120.0
STREAM = (Path(__file__).parents[1] / "fixtures" / "wire" / "vllm_chat_stream_basic.sse").read_bytes()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}], "stream": True}


@dataclass
class SlowEngine:
    """Accepts nobody before ``accept`` is called, and answers nobody before ``speak`` is set."""

    listener: socket.socket
    asked: list[bytes] = field(default_factory=list)
    all_asked: asyncio.Event = field(default_factory=asyncio.Event)
    speak: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    @asynccontextmanager
    async def accepting(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, sock=self.listener, backlog=BACKLOG):
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:] if line]
        fields = {name.lower(): value for name, _, value in lines}
        await reader.readexactly(int(fields[b"content-length"]))
        self.asked.append(fields[b"x-request-id"])
        if len(self.asked) == CALLS:
            self.all_asked.set()
        await self.speak.wait()
        writer.write(HEAD + STREAM)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def capture(engine: SlowEngine, event_writer: MemoryEventWriter) -> AsyncIterator[int]:
    """Capture behind a real server, with the client for upstreams that it has in production."""
    settings = CaptureSettings(upstream=engine.url, probe=False)
    table = SessionTable()
    for number in range(CALLS):
        name = f"s{number}"
        table.apply(SessionEntry(session_id=name, state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0))
    stop = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        async with make_client(settings) as client:
            app = assemble(
                CaptureParts(
                    settings=settings,
                    sessions=table,
                    position=CaughtUp(),
                    announced=AnnouncedVersions(),
                    event_writer=event_writer,
                    upstream=Upstream(client),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
            )
            running = asyncio.create_task(serve(app, listener, settings, stop))
            yield listener.getsockname()[1]
            stop.set()
            await running


async def test_a_thousand_calls_wait_for_a_slow_and_silent_engine_and_none_fails_or_is_made_twice() -> None:
    event_writer = MemoryEventWriter()
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        engine = SlowEngine(listener)
        async with asyncio.timeout(WAIT), capture(engine, event_writer) as port:
            calls = [asyncio.create_task(_call(port, number)) for number in range(CALLS)]
            await _lag(seconds=2.0)
            async with engine.accepting():
                await engine.all_asked.wait()
                # All are waiting now; the loop that holds them stays free for others.
                assert await _lag(seconds=1.0) < 0.25
                engine.speak.set()
                replies = await asyncio.gather(*calls)
    assert Counter(replies) == {"It is 4.": CALLS}
    assert len(engine.asked) == len(set(engine.asked)) == CALLS
    records = [record for record in event_writer.of(COMPLETIONS) if isinstance(record, CompletionRecord)]
    assert Counter(record.status for record in records) == {CallStatus.OK: CALLS}
    assert len({record.session_id for record in records}) == CALLS


async def _call(port: int, number: int) -> str:
    """The text of one streamed reply, by a client without a pool: a thousand connections cost it nothing."""
    body = orjson.dumps(ASK)
    path = f"/sessions/s{number}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: capture\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    frames = [orjson.loads(line) for line in re.findall(rb"data: (\{.*\})", answer)]
    assert b"data: [DONE]" in answer, answer
    return "".join(choice["delta"].get("content") or "" for chunk in frames for choice in chunk["choices"])


async def _lag(seconds: float) -> float:
    """How late the loop was, at worst, within this time."""
    worst, end = 0.0, time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - now - 0.01)
    return worst
