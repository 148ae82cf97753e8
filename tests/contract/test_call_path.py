"""A chat call passes through few files between the ASGI application and Kafka's producer: a reader can follow it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from rollmill.models import SessionEntry, SessionSpec, SessionState
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.tables import CaughtUp
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.event_log.event_writer import KafkaEventProducer, LogEventWriter
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client
from tests.call_path import CallPath, recorded_call_path

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
WAIT = 5.0
MOST_FILES = 25
CHAT = "/sessions/s1/v1/chat/completions"
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}], "temperature": 0.7, "top_p": 1}


@dataclass
class _Producer:
    """Acknowledges every record at once; the call's path ends where it gets one."""

    sent: list[str] = field(default_factory=list)
    path: CallPath | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def send(self, topic: str, value: bytes, key: bytes, headers: list[Any]) -> asyncio.Future[None]:
        del value, key, headers
        if self.path is not None:
            self.path.passed = True
        self.sent.append(topic)
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        acknowledged.set_result(None)
        return acknowledged


class _Clients(KafkaClients):
    def __init__(self, settings: CaptureSettings, producer: _Producer) -> None:
        super().__init__(settings)
        self._producer = producer

    def producer(self, transactional_id: str | None = None, *, linger_ms: int = 2) -> Any:
        del transactional_id, linger_ms
        return self._producer


@asynccontextmanager
async def _capture(answer: CannedResponse, producer: _Producer) -> AsyncIterator[Starlette]:
    """Capture as a service runs it, up to Kafka's producer, in front of a server that plays ``answer``."""

    def play(asked: CannedRequest) -> CannedResponse:
        assert asked.path == "/v1/chat/completions"
        return answer

    async with canned_server(play) as engine:
        settings = CaptureSettings(upstream=engine.url)
        log = KafkaEventProducer(_Clients(settings, producer), settings.prefix, WAIT)
        async with log, make_client(settings) as client:
            sessions = SessionTable()
            opened = SessionEntry(
                session_id="s1", attempt=1, state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0
            )
            sessions.apply(opened)
            yield assemble(
                CaptureParts(
                    settings=settings,
                    sessions=sessions,
                    position=CaughtUp(),
                    announced=AnnouncedVersions(),
                    event_writer=LogEventWriter(log, None, Metrics("capture")),
                    upstream=Upstream(client),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
            )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat_call_passes_few_files(*, streams: bool) -> None:
    producer = _Producer()
    async with asyncio.timeout(WAIT), _capture(_answer(streams=streams), producer) as app:
        with recorded_call_path() as path:
            producer.path = path
            async with AsgiCall(app, "POST", CHAT, {**ASK, "stream": streams}) as call:
                body = await call.rest()
    assert (call.status, len(producer.sent)) == (200, 1)
    assert (b"data: [DONE]" if streams else b"It is 4.") in body
    assert path.passed
    files = path.files()
    assert "rollmill_capture/proxy/call_handler.py" in files
    assert len(files) <= MOST_FILES, "\n".join([f"{len(files)} files:", *files])


def _answer(*, streams: bool) -> CannedResponse:
    if streams:
        return CannedResponse.events((WIRE / "vllm_chat_stream_basic.sse").read_bytes())
    return CannedResponse(((WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes(),))
