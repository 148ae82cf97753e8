"""What a client may send: in time, with a key where one is needed, and compressed as it likes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette

from rollmill.models import SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.server import listen, serve
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
WHOLE = (WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes()
ASK = orjson.dumps({"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}]})
CALL = "/sessions/s1/v1/chat/completions"
WAIT = 10.0


@dataclass
class Capture:
    app: Starlette
    events: MemoryEventWriter
    asked: list[httpx.Request]

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with AsgiCall(self.app, "POST", path, body, named) as call:
            answer = await call.json()
            return call.status, answer


def capture(**settings: Any) -> Capture:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=WHOLE)

    sessions, events = SessionTable(), MemoryEventWriter()
    spec = SessionSpec()
    sessions.apply(SessionEntry(session_id="s1", attempt=1, state=SessionState.OPEN, spec=spec, opened_at=1.0))
    app = assemble(
        CaptureParts(
            settings=CaptureSettings(**settings),
            sessions=sessions,
            position=CaughtUp(),
            announced=AnnouncedVersions(),
            event_writer=events,
            upstream=Upstream(httpx.AsyncClient(transport=httpx.MockTransport(answer))),
            clock=ManualClock(),
            metrics=Metrics("capture"),
        )
    )
    return Capture(app, events, asked)


def _bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress), ("deflate", _bare)],
    ids=["gzip", "capitals", "deflate", "bare deflate"],
)
async def test_c17_a_compressed_request_is_recorded_as_the_plain_one(
    encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    plain, packed = capture(), capture()
    assert await plain.post(CALL, ASK) == await packed.post(CALL, compress(ASK), content_encoding=encoding)
    records = [each.events.of(COMPLETIONS)[0] for each in (plain, packed)]
    assert records[0].request == records[1].request
    assert plain.asked[0].content == packed.asked[0].content
    assert "content-encoding" not in packed.asked[0].headers


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress"])
async def test_c17_an_encoding_that_is_not_known_is_refused_by_name(encoding: str) -> None:
    status, body = await capture().post(CALL, b"x", content_encoding=encoding)
    assert status == 415
    assert encoding in body["error"]["message"]


@pytest.mark.parametrize(
    "path", [CALL, "/v1/sessions", "/sessions/s1/v1/messages/count_tokens", "/v1/sessions/s1/close"]
)
async def test_c17_the_limit_is_on_the_decoded_size(path: str) -> None:
    bomb = gzip.compress(b'{"a": "' + b" " * 2**27 + b'"}')
    status, _ = await capture(request_bytes=2**20).post(path, bomb, content_encoding="gzip")
    assert status == 413


async def test_c17_a_body_that_is_not_what_it_claims_is_refused() -> None:
    status, body = await capture().post(CALL, ASK, content_encoding="gzip")
    assert status == 400
    assert "compressed" in body["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/sessions", "/v1/sessions/s1/close", "/v1/sessions/s1/reward", "/admin/policies/p/pause", CALL,
     "/sessions/s1/v1/messages/count_tokens"],
)  # fmt: skip
async def test_f16_no_body_is_read_without_a_key(path: str) -> None:
    """The body is broken: whoever reads it before the key complains of it."""
    keys = {"tenant": hashlib.sha256(b"key").hexdigest()}
    for key in ("", "wrong"):
        status, _ = await capture(api_keys=keys).post(path, b"{", authorization=f"Bearer {key}")
        assert status in {401, 403, 404}


MODEL_ROUTES = (
    *("v1/chat/completions", "v1/completions", "v1/messages", "v1/responses", "v1/messages/count_tokens", "generate"),
    *("inference/v1/generate", "v1beta/models/m:generateContent", "v1beta/models/m:countTokens"),
    "v1/models/m:countTokens",
)


@pytest.mark.parametrize("model", [["a"], {"a": 1}, 7, True, [], {}])
@pytest.mark.parametrize("path", MODEL_ROUTES)
async def test_f18_a_model_that_is_no_text_fails_nowhere(path: str, model: object) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "text": "a"}
    body |= {"contents": [{"parts": [{"text": "a"}]}], "max_tokens": 1, "token_ids": [1]}
    body |= {"generateContentRequest": {"model": model, "contents": [{"parts": [{"text": "a"}]}]}}
    status, _ = await capture().post(f"/sessions/s1/{path}", orjson.dumps(body))
    assert status in ({400} if path == "v1/messages/count_tokens" else {200, 400, 422, 502})


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    options = CaptureSettings(port=1, **settings).model_copy(update={"port": 0})
    listener, stop = listen(options), asyncio.Event()
    running = asyncio.create_task(serve(capture(**settings).app, listener, options, stop))
    try:
        async with asyncio.timeout(WAIT):
            yield listener.getsockname()[:2]
    finally:
        stop.set()
        await running


HEAD = b"POST /sessions/s1/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % len(ASK)


@pytest.mark.parametrize("sent", [b"", b"P", HEAD], ids=["nothing", "a letter", "half a head"])
async def test_f16_a_head_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with listening(header_seconds=0.3) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_f16_a_head_that_comes_byte_by_byte_has_no_more_time() -> None:
    async with listening(header_seconds=0.3) as address:
        reader, writer = await asyncio.open_connection(*address)
        ended = asyncio.create_task(reader.read())
        for byte in HEAD * 100:
            writer.write(bytes((byte,)))
            done, _ = await asyncio.wait((ended,), timeout=0.02)
            if done:
                break
        assert await ended == b""
        writer.close()


async def test_f16_half_a_second_request_is_not_waited_for_either() -> None:
    async with listening(header_seconds=0.3) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"\r\n" + ASK)
        assert b"It is 4." in await _reply(reader)
        writer.write(HEAD)
        assert await reader.read() == b""
        writer.close()


async def test_f16_a_body_that_does_not_come_is_answered_with_408_and_the_end() -> None:
    async with listening(body_seconds=0.3) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"\r\n" + ASK[:-3])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
        writer.close()


async def test_a_request_in_time_is_served_and_its_connection_kept() -> None:
    async with listening(header_seconds=5.0, body_seconds=5.0) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(HEAD + b"\r\n" + ASK)
            assert b"It is 4." in await _reply(reader)
        writer.close()


async def _reply(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))
