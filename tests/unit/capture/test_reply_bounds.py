"""Replies of an upstream that are too large, or that compression makes so: an error, a record, and little memory."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from rollmill.models import CallStatus, CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import RouteTable, Upstream, make_client
from rollmill_capture.upstream.probe import Probe

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
WHOLE = (WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes()
STREAM = (WIRE / "vllm_chat_stream_basic.sse").read_bytes()
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}]}
LIMIT = 2**20
BOMB = gzip.compress(b'{"choices": [' + b" " * 2**28 + b"]}")
WAIT = 20.0


@dataclass
class Capture:
    app: Starlette
    events: MemoryEventWriter = field(default_factory=MemoryEventWriter)

    async def ask(self, path: str = "chat/completions", **changes: Any) -> tuple[int, bytes]:
        async with AsgiCall(self.app, "POST", f"/sessions/s1/v1/{path}", {**ASK, **changes}) as call:
            body = await call.rest()
            return call.status, body

    @property
    def records(self) -> list[CompletionRecord]:
        return self.events.of(COMPLETIONS)


def packed(content: bytes, encoding: str, kind: str = "application/json", status: int = 200) -> CannedResponse:
    """The server writes header values as they are, so a second header may follow."""
    return CannedResponse((content,), status, f"{kind}\r\ncontent-encoding: {encoding}")


@asynccontextmanager
async def capture(answer: CannedResponse) -> AsyncIterator[Capture]:
    def play(_: CannedRequest) -> CannedResponse:
        return answer

    async with asyncio.timeout(WAIT), canned_server(play) as engine:
        settings, sessions, events = CaptureSettings(upstream=engine.url), SessionTable(), MemoryEventWriter()
        spec = SessionSpec()
        sessions.apply(SessionEntry(session_id="s1", attempt=1, state=SessionState.OPEN, spec=spec, opened_at=1.0))
        async with make_client(settings) as client:
            app = assemble(
                CaptureParts(
                    settings=settings,
                    sessions=sessions,
                    position=CaughtUp(),
                    announced=AnnouncedVersions(),
                    event_writer=events,
                    upstream=Upstream(client, reply_bytes=LIMIT),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
            )
            yield Capture(app, events)


@pytest.mark.parametrize("status", [200, 400])
async def test_f16_a_compressed_bomb_is_an_error_and_takes_no_memory(status: int) -> None:
    async with capture(packed(BOMB, "gzip", status=status)) as running:
        tracemalloc.start()
        got, body = await running.ask()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert got == 502
    assert f"over {LIMIT} bytes".encode() in body
    [record] = running.records
    assert record.status is not CallStatus.OK
    assert "ROLLMILL_REPLY_BYTES" in (record.error or "")
    assert most < 16 * LIMIT


async def test_f16_a_plain_reply_over_the_limit_is_an_error_too() -> None:
    async with capture(CannedResponse((b'{"choices": [' + b" " * LIMIT + b"]}",))) as running:
        status, _ = await running.ask()
    assert (status, len(running.records)) == (502, 1)


async def test_f16_a_bomb_in_a_stream_ends_at_the_streams_own_bound() -> None:
    async with capture(packed(BOMB, "gzip", "text/event-stream")) as running:
        tracemalloc.start()
        await running.ask(stream=True)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert [record.status for record in running.records] == [CallStatus.INCOMPLETE]
    assert most < 150 * 2**20


@pytest.mark.parametrize("path", ["messages/count_tokens"])
async def test_f16_a_count_by_an_upstream_that_sends_a_bomb_is_estimated(path: str) -> None:
    async with capture(packed(BOMB, "gzip")) as running:
        status, body = await running.ask(path)
    assert status == 200
    assert b"input_tokens" in body


async def test_a_compressed_reply_is_recorded_as_a_plain_one() -> None:
    async with capture(CannedResponse((WHOLE,))) as plain, capture(packed(gzip.compress(WHOLE), "gzip")) as zipped:
        assert await plain.ask() == await zipped.ask()
        assert plain.records[0].response == zipped.records[0].response
    async with capture(packed(gzip.compress(STREAM), "gzip", "text/event-stream")) as zipped:
        status, body = await zipped.ask(stream=True)
        assert (status, b"data: [DONE]" in body) == (200, True)
        assert zipped.records[0].status is CallStatus.OK


@pytest.mark.parametrize(
    "answer", [packed(WHOLE, "br"), packed(WHOLE, "gzip"), packed(gzip.compress(WHOLE)[:-9], "gzip")]
)
async def test_an_encoding_that_is_unknown_or_broken_is_an_error(answer: CannedResponse) -> None:
    async with capture(answer) as running:
        status, body = await running.ask()
    assert status == 502
    assert b"no usable answer" in body
    assert len(running.records) == 1


async def test_f16_a_bomb_in_the_list_of_models_is_no_list() -> None:
    def play(_: CannedRequest) -> CannedResponse:
        return packed(BOMB, "gzip")

    async with asyncio.timeout(WAIT), canned_server(play) as engine:
        settings = CaptureSettings(upstream=engine.url)
        async with make_client(settings) as client:
            (target,) = RouteTable(settings).trained
            with pytest.raises(httpx.DecodingError, match="over"):
                await Probe(client, EngineCapabilities((target,)), Metrics("capture")).probe(target)
