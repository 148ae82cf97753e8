"""An upstream that is no model server: a web page, a dead port, an address without a scheme."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from rollmill.models import CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.http.scripted_engine import ScriptedEngine
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.model_config import Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import RouteTable, Upstream, make_client
from rollmill_capture.upstream.probe import Probe

WAIT = 10.0
PAGE = b"<!DOCTYPE html><html><title>Welcome</title>"
BEGINS = "<!DOCTYPE html>"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def page(status: int) -> CannedResponse:
    return CannedResponse((PAGE,), status, "text/html; charset=utf-8")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [200, 404, 405, 501])
async def test_b7_a_call_to_a_web_page_names_its_url_and_what_it_answered(status: int, stream: bool) -> None:
    writer, sessions = MemoryEventWriter(), SessionTable()
    sessions.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0))
    async with asyncio.timeout(WAIT), canned_server(lambda _: page(status)) as engine:
        settings = CaptureSettings(upstream=engine.url)
        async with make_client(settings) as to_engine:
            app = assemble(
                CaptureParts(
                    settings=settings,
                    sessions=sessions,
                    position=CaughtUp(),
                    announced=AnnouncedVersions(),
                    event_writer=writer,
                    upstream=Upstream(to_engine),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://capture") as http:
                answer = await http.post("/sessions/s/v1/chat/completions", json={**HI, "stream": stream})
                listed = await http.get("/v1/models")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (502, "server_error")
    assert f"{engine.url}/v1/chat/completions" in error["message"]
    assert BEGINS in error["message"]
    assert (listed.status_code, BEGINS in listed.json()["error"]["message"]) == (502, True)
    (record,) = writer.of(COMPLETIONS)
    assert isinstance(record, CompletionRecord)
    assert BEGINS in (record.error or "")


async def probed_until_noted(upstream: str) -> tuple[Health, list[Any]]:
    settings, health, noted = CaptureSettings(upstream=upstream), Health(), asyncio.Event()
    health.ready("http")

    def note(about: str, text: str | None) -> None:
        health.note(about, text)
        noted.set()

    with capture_logs() as logs:
        async with asyncio.timeout(WAIT), make_client(settings) as client:
            engines = EngineCapabilities(RouteTable(settings).trained)
            running = asyncio.create_task(Probe(client, engines, Metrics("capture"), note).run())
            await noted.wait()
            running.cancel()
            await asyncio.wait((running,))
    return health, [line for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_b7_ready_and_one_log_line_show_a_web_page_as_upstream(status: int) -> None:
    async with canned_server(lambda _: page(status)) as engine:
        health, warnings = await probed_until_noted(engine.url)
    code, shown = health.readiness()
    (line,) = warnings
    assert code == 200
    for text in (str(shown["notes"]), line["error"]):
        assert f"{engine.url}/v1/models" in text
        assert BEGINS in text


async def test_b7_ready_and_one_log_line_show_a_dead_upstream() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    health, (line,) = await probed_until_noted(url)
    assert url in str(health.readiness()[1]["notes"])
    assert "cannot be reached" in line["error"]


async def test_b7_the_note_goes_once_the_upstream_is_a_model_server() -> None:
    health = Health()
    async with canned_server(ScriptedEngine(("ok",)).answer) as engine:
        settings = CaptureSettings(upstream=engine.url)
        health.note(engine.url, "dead")
        async with asyncio.timeout(WAIT), make_client(settings) as client:
            await Probe(client, EngineCapabilities(RouteTable(settings).trained), Metrics("capture"), health.note).run()
    assert "notes" not in health.readiness()[1]


async def test_b7_an_upstream_without_a_scheme_is_one_of_http() -> None:
    asked: list[str] = []

    def answer(request: CannedRequest) -> CannedResponse:
        asked.append(request.path)
        return CannedResponse.json({"data": []})

    async with asyncio.timeout(WAIT), canned_server(answer) as engine:
        settings = CaptureSettings(upstream=engine.url.removeprefix("http://"))
        assert settings.upstreams_without_scheme == [settings.upstream]
        target = RouteTable(settings).find(None)
        assert target.root == engine.url
        async with make_client(settings) as client:
            found = await Upstream(client).models(target)
    assert (orjson.loads(found.content), asked) == ({"data": []}, ["/v1/models"])


@pytest.mark.parametrize("url", ["ftp://engine", "http://", "", "unix:///tmp/engine"])
def test_b7_what_is_no_url_of_an_upstream_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValidationError, match=r"give one like http://127\.0\.0\.1:8000"):
        CaptureSettings(upstream=url)
    with pytest.raises(ValidationError, match="is not the URL of an upstream"):
        Route(upstream=url)
