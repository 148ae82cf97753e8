"""`rollmill.session()` and `rollmill exec` against capture's own application, over real HTTP."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollmill
import rollmill.client
from rollmill.client import CaptureRefusedError, CaptureUnreachableError
from rollmill.client.http_client import HttpClient
from rollmill.errors import InvalidInputError
from rollmill.models import PolicyVersion, SessionClosed, SessionOpened, SessionStatus
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS, EVALUATIONS
from rollmill.trainer.policy.capture_client import Captures
from rollmill.trainer.policy.capture_client import CaptureUnreachableError as TrainerCaptureError
from rollmill_capture.admission import Admission, AdmissionLimits
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.keys import digest_of
from rollmill_capture.http.server import serve
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WAIT = 30.0


@dataclass
class Capture:
    url: str = ""
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)

    @property
    def events(self) -> list[Any]:
        return self.event_writer.of(COMPLETIONS)

    @property
    def opened(self) -> SessionOpened:
        (event,) = [event for event in self.events if isinstance(event, SessionOpened)]
        return event

    @property
    def closed(self) -> SessionClosed:
        (event,) = [event for event in self.events if isinstance(event, SessionClosed)]
        return event


@pytest.fixture
def settings() -> CaptureSettings:
    return CaptureSettings(close_seconds=1.0)


@pytest.fixture
async def capture(settings: CaptureSettings) -> AsyncIterator[Capture]:
    made, announced, stop = Capture(), AnnouncedVersions(), asyncio.Event()
    table, clock = SessionTable(), SystemClock()
    admission = Admission({"policy": AdmissionLimits(max_staleness=0, per_version=2)}, announced.newest)
    table.on_change = lambda entry: admission.observe(entry, clock.now())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        public = settings.model_copy(update={"public_url": f"http://127.0.0.1:{port}"})
        app = assemble(
            CaptureParts(
                settings=public,
                sessions=table,
                position=CaughtUp(),
                announced=announced,
                event_writer=made.event_writer,
                upstream=Upstream(httpx.AsyncClient()),
                clock=clock,
                metrics=Metrics("capture"),
                admission=admission,
            )
        )
        running = asyncio.create_task(serve(app, listener, settings, stop))
        made.url = f"http://127.0.0.1:{port}"
        yield made
        stop.set()
        await running


async def test_a_block_is_a_session_that_closes_with_what_it_came_to(capture: Capture) -> None:
    async with rollmill.session("say-7", group="g1", group_size=2, url=capture.url, dataset="d") as session:
        assert session.base_url == f"{capture.url}/sessions/{session.id}/v1"
        assert session.environment["OPENAI_API_KEY"] == session.api_key
        session.finish(output={"answer": 7}, reward=0.5)
    spec = capture.opened.spec
    assert (spec.task_id, spec.group_id, spec.group_size, spec.dataset) == ("say-7", "g1", 2, "d")
    closed = capture.closed
    assert (closed.status, closed.reward, closed.output) == (SessionStatus.COMPLETED, 0.5, b'{"answer":7}')


async def test_an_exception_closes_the_session_as_failed_and_goes_on(capture: Capture) -> None:
    def play() -> None:
        with rollmill.session(url=capture.url):
            raise ZeroDivisionError("by the agent")

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(play)
    assert (capture.closed.status, capture.closed.error) == (SessionStatus.ERROR, "ZeroDivisionError: by the agent")


async def test_a_cancelled_block_closes_its_session(capture: Capture) -> None:
    begun = asyncio.Event()

    async def play() -> None:
        async with rollmill.session(url=capture.url):
            begun.set()
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert capture.closed.status is SessionStatus.ERROR


async def test_a_refusal_comes_with_captures_advice(capture: Capture) -> None:
    with pytest.raises(CaptureRefusedError, match="did you mean 'group_id'") as refused:
        await asyncio.to_thread(rollmill.session(url=capture.url, groupid="g").open)
    assert refused.value.status == 422


async def test_where_admission_is_full_opening_waits_and_then_gives_up(capture: Capture) -> None:
    first = rollmill.session(group="g", group_size=2, url=capture.url)
    await asyncio.to_thread(first.open)
    pauses: list[float] = []
    web = HttpClient(capture.url, patience=12.0, sleep=pauses.append, now=lambda: sum(pauses))
    with pytest.raises(CaptureRefusedError, match="room for 0 more") as refused:
        await asyncio.to_thread(web.post, "/v1/sessions", {"group_id": "h"})
    assert (refused.value.status, pauses) == (429, [5.0, 5.0])


async def test_nobody_there_is_told_with_advice() -> None:
    with pytest.raises(CaptureUnreachableError, match="rollmill up"):
        await asyncio.to_thread(HttpClient("http://127.0.0.1:9", patience=0.0).post, "/v1/sessions", {})
    with pytest.raises(InvalidInputError, match="no address"):
        HttpClient("localhost:8700").post("/v1/sessions", {})


def test_b1_a_wrong_address_is_told_at_once_and_given_up_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []
    web = HttpClient("http://127.0.0.1:9", patience=600.0, sleep=pauses.append, now=lambda: sum(pauses))
    with pytest.raises(CaptureUnreachableError, match="no capture answers at http://127"):
        web.post("/v1/sessions", {}, first=True)
    assert sum(pauses) == 10.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("trying for 10 s")
    with pytest.raises(CaptureUnreachableError):  # a session that was opened is closed with all patience
        web.post("/v1/sessions/s/close", {})
    assert sum(pauses) == 610.0


def test_a_session_is_known_inside_its_block_only() -> None:
    with pytest.raises(InvalidInputError, match="inside `with"):
        _ = rollmill.session().base_url


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> CaptureSettings:
        return CaptureSettings(api_keys={"alice": digest_of("key-of-alice")})

    async def test_a_tenants_key_opens_and_closes(self, capture: Capture) -> None:
        async with rollmill.session(url=capture.url, api_key="key-of-alice"):
            pass
        assert capture.opened.spec.metadata == {"tenant": "alice"}
        with pytest.raises(CaptureRefusedError, match="tenant's key"):
            await asyncio.to_thread(rollmill.session(url=capture.url).open)


async def execute(capture: Capture, *arguments: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, "ROLLMILL_CAPTURE_URL": capture.url}
    command = (sys.executable, "-m", "rollmill.cli", "exec", *arguments)
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=PIPE)


SHOW = "import os; print(os.environ['OPENAI_BASE_URL'], os.environ['ROLLMILL_TASK_ID'])"


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("; raise SystemExit(3)", 3)])
async def test_a_command_is_a_session_by_its_environment_and_its_exit_code(
    capture: Capture, ending: str, code: int
) -> None:
    options = ("--task", "t1", "--group", "g1", "--evaluator", "session_completed")
    process = await execute(capture, *options, "--", sys.executable, "-c", SHOW + ending)
    out, err = await asyncio.wait_for(process.communicate(), WAIT)
    assert process.returncode == code, err
    assert out.decode().split() == [f"{capture.url}/sessions/{capture.opened.session_id}/v1", "t1"]
    assert capture.closed.status is (SessionStatus.ERROR if code else SessionStatus.COMPLETED)
    assert capture.opened.spec.evaluators[0].strategy == "session_completed"


async def test_a_signal_is_the_commands_and_the_session_is_closed(capture: Capture, tmp_path: Path) -> None:
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    play = f"import time; open({str(pipe)!r}, 'w').close(); time.sleep(60)"
    process = await execute(capture, "--", sys.executable, "-c", play)
    await asyncio.wait_for(asyncio.to_thread(pipe.read_bytes), WAIT)
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), WAIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert (capture.closed.status, capture.closed.error) == (SessionStatus.ERROR, "exit code 143")


async def test_a_command_that_is_not_there_is_told_as_a_shell_does(capture: Capture) -> None:
    process = await execute(capture, "--", "no-such-program")
    await asyncio.wait_for(process.communicate(), WAIT)
    assert process.returncode == 127
    assert capture.closed.error == "exit code 127"


async def test_a_trainer_pauses_every_capture_and_tells_it_the_version(capture: Capture) -> None:
    captures = Captures([capture.url])
    await asyncio.to_thread(captures.pause, "policy", "keep", 0.0)
    async with httpx.AsyncClient(base_url=capture.url) as http:
        status = (await http.get("/admin/policies/policy/status")).json()
        assert (status["paused"], status["mode"]) == (True, "keep")
        await asyncio.to_thread(partial(captures.resume, "policy", PolicyVersion(1, 3), cache_reset=True))
        status = (await http.get("/admin/policies/policy/status")).json()
    assert (status["paused"], status["version"], status["kv_maybe_stale"]) == (False, [1, 3], False)


async def test_a_capture_that_does_not_do_it_is_an_error_for_the_trainer(capture: Capture) -> None:
    with pytest.raises(InvalidInputError, match="wait, keep, abort_resume"):
        Captures([capture.url]).pause("policy", "stop", 0.0)
    with pytest.raises(TrainerCaptureError, match="answers 404"):
        await asyncio.to_thread(Captures([capture.url]).pause, "no/policy", "keep", 0.0)
    with pytest.raises(TrainerCaptureError, match="refused"):
        await asyncio.to_thread(Captures(["http://127.0.0.1:9"]).pause, "policy", "keep", 0.0)


async def test_a_reward_from_outside_is_an_evaluation_and_may_be_said_again(capture: Capture) -> None:
    async with rollmill.session(url=capture.url, session_id="graded") as session:
        pass
    give = partial(rollmill.client.reward, session.id, 0.5, url=capture.url, evaluator="eve")
    names = [await asyncio.to_thread(give) for _ in range(2)]
    options = ("--url", capture.url, "--evaluator", "eve", "--supersedes", names[0])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmill.cli", "reward", session.id, "1.0", *options, stdout=PIPE
    )
    shown, _ = await asyncio.wait_for(process.communicate(), WAIT)
    first, again, revised = capture.event_writer.of(EVALUATIONS)
    assert names == [first.evaluation_id, again.evaluation_id]
    assert len(set(names)) == 1
    assert shown.decode().strip() == revised.evaluation_id
    assert (first.outcome_reward, first.evaluator) == (0.5, "eve")
    assert (revised.outcome_reward, revised.supersedes) == (1.0, first.evaluation_id)
    with pytest.raises(CaptureRefusedError, match="no session 'nobody'"):
        await asyncio.to_thread(rollmill.client.reward, "nobody", 1.0, url=capture.url)
