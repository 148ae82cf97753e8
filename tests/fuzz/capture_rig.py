"""Capture in memory, for arbitrary requests of two tenants, an administrator, an agent and others."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
from starlette.routing import Route

from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
SECONDS = 1.0
"""No response takes longer."""
LONGEST = 20.0
"""Then the request is given up."""
TENANTS = {"a": "key-of-tenant-a", "b": "key-of-tenant-b"}
ADMIN = "key-of-the-administrator"
SESSION, POLICY = "s1", "policy"
UPSTREAM_STATUSES = (502, 503, 504)
STREAMED = re.compile(rb'"stream":\s*true')
REPLIES = {
    "/chat/completions": "vllm_chat_nonstream_token_ids.json",
    "/completions": "vllm_completions_nonstream_token_ids.json",
    "/inference/v1/generate": "vllm_inference_generate_nonstream.json",
    "/generate": "sglang_generate_nonstream.json",
}


@dataclass(frozen=True)
class FuzzRequest:
    """One request as it goes out, and what is needed to send it again."""

    method: str
    path: str
    query: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Finding:
    """What is wrong with the response to a request."""

    request: FuzzRequest
    fault: str

    def __str__(self) -> str:
        request = self.request
        headers = " ".join(f"{name}={value[:60]!r}" for name, value in request.headers.items())
        return (
            f"{request.method} {request.path[:300]}?{request.query!r} {headers} {request.body[:1500]!r}: {self.fault}"
        )


class CaptureRig:
    """A fresh capture with one open session of tenant ``a``. ``upstream``: the body of the next reply, or a status."""

    def __init__(self) -> None:
        self.event_writer = MemoryEventWriter()
        self.upstream: tuple[int, bytes] | None = None
        self.upstream_failed = False
        self.app = assemble(
            CaptureParts(
                settings=_settings(),
                sessions=SessionTable(),
                position=CaughtUp(),
                announced=AnnouncedVersions(),
                event_writer=self.event_writer,
                upstream=Upstream(httpx.AsyncClient(transport=httpx.MockTransport(self._reply))),
                clock=ManualClock(1000.0),
                metrics=Metrics("capture"),
            )
        )
        self.token = ""
        self._decoded = 0

    @property
    def routes(self) -> list[Route]:
        """Every route of the application."""
        return [route for route in self.app.routes if isinstance(route, Route)]

    def keys(self) -> tuple[str | None, ...]:
        """Both tenants' keys, the administrator's, the session's token, a wrong one, and none."""
        return (TENANTS["a"], TENANTS["b"], ADMIN, self.token, "rm-wrong", None)

    async def open_session(self) -> None:
        """Open the session that most requests name."""
        body = orjson.dumps({"session_id": SESSION, "evaluators": [{"strategy": "external", "name": "human"}]})
        status, reply = await self._send(FuzzRequest("POST", "/v1/sessions", headers=bearer(TENANTS["a"]), body=body))
        assert status in (200, 201), reply
        self.token = orjson.loads(reply)["api_key"]

    async def status(self, request: FuzzRequest) -> int:
        """The status of the response to a request that has to succeed."""
        return (await self._send(request))[0]

    async def check(self, request: FuzzRequest) -> Finding | None:
        """Send the request; None: nothing is wrong with the response, nor with what was recorded."""
        fault = await self._fault(request)
        if request.path.endswith("/pause"):
            await self._resume()
        return None if fault is None else Finding(request, fault)

    async def _fault(self, request: FuzzRequest) -> str | None:
        self.upstream_failed = False
        elapsed = []
        for _ in range(3):  # a machine that is busy with something else is slow once, and not three times
            began = time.monotonic()
            try:
                status, body = await self._send(request)
            except TimeoutError:
                return f"no response within {LONGEST} s"
            except Exception as error:  # noqa: BLE001  # whatever leaves the application is the finding
                return f"{type(error).__name__}: {str(error)[:300]}"
            elapsed.append(time.monotonic() - began)
            if elapsed[-1] <= SECONDS:
                return self._wrong_status(status, body) or self._wrong_event()
        return f"three responses took {min(elapsed):.1f} s and more"

    def _wrong_status(self, status: int, body: bytes) -> str | None:
        """A status of 5xx is right where the upstream's reply was an error or could not be read."""
        allowed = (*UPSTREAM_STATUSES, self.upstream[0]) if self.upstream_failed and self.upstream else ()
        return f"status {status}: {body[:300]!r}" if not 100 <= status < 500 and status not in allowed else None

    def _wrong_event(self) -> str | None:
        """What was recorded since the last request decodes by its topic's model."""
        new, self._decoded = self.event_writer.appended[self._decoded :], len(self.event_writer.appended)
        try:
            keys = [item.key for item in new if item.record is not None]
        except Exception as error:  # noqa: BLE001  # whatever a reader of the topic would raise is the finding
            return f"a recorded event cannot be read: {type(error).__name__}: {error}"
        return None if all(keys) else "an event was recorded without a key"

    async def _send(self, request: FuzzRequest) -> tuple[int, bytes]:
        call = AsgiCall(self.app, request.method, request.path, request.body, request.headers)
        call.query(request.query)
        async with asyncio.timeout(LONGEST), call:
            body = await call.rest()
        return call.status, body

    async def _resume(self) -> None:
        """End the pause that the last request may have begun, so that the next call need not wait for it."""
        await self._send(FuzzRequest("POST", f"/admin/policies/{POLICY}/resume", headers=bearer(ADMIN)))

    def _reply(self, request: httpx.Request) -> httpx.Response:
        status, body = self.upstream or (200, _usual_reply(request))
        self.upstream_failed |= self.upstream is not None
        kind = "text/event-stream" if body.startswith((b"data:", b"event:", b":")) else "application/json"
        return httpx.Response(status, headers={"content-type": kind}, content=body)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _settings() -> CaptureSettings:
    return CaptureSettings(
        host="0.0.0.0",
        api_keys={tenant: _digest(key) for tenant, key in TENANTS.items()},
        admin_key_sha256=_digest(ADMIN),
        upstream="http://engine/v1",
        close_seconds=0.2,
        lookup_seconds=0.2,
        request_bytes=2**20,
    )


def _usual_reply(request: httpx.Request) -> bytes:
    """What a healthy engine replies."""
    path = request.url.path
    if path.endswith("/models"):
        return orjson.dumps({"object": "list", "data": [{"id": "m-test", "object": "model"}]})
    if path.endswith("/tokenize"):
        return orjson.dumps({"count": 7})
    if STREAMED.search(request.content):
        stream = "sglang_generate_stream_incremental.sse" if path == "/generate" else "vllm_chat_stream_basic.sse"
        return (WIRE / stream).read_bytes()
    name = next((name for end, name in REPLIES.items() if path.endswith(end)), REPLIES["/chat/completions"])
    return (WIRE / name).read_bytes()
