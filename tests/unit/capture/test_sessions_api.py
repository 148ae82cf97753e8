"""Opening, showing and closing sessions through the HTTP application."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from rollmill.errors import InvalidInputError
from rollmill.models import SessionClosed, SessionEntry, SessionOpened, SessionSpec, SessionState, SessionStatus
from rollmill.models.spec_maxima import SpecMaxima
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import validate_session_spec
from rollmill.strategies.allow_list import SETTING
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.topics import COMPLETIONS, SESSIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import InFlight, SessionTable
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.keys import digest_of
from rollmill_capture.http.session_requests import read_close_request
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WAIT = 5.0
SPEC = {"task_id": "t1", "group_id": "g1", "group_size": 8, "evaluators": [{"strategy": "known"}]}


def known_only(spec: SessionSpec) -> None:
    for evaluator in spec.evaluators:
        if evaluator.strategy != "known":
            raise InvalidInputError(f"unknown evaluator {evaluator.strategy!r}: known are known")


@dataclass
class Elsewhere:
    """A table position whose next record arrives only when something waits for it."""

    table: SessionTable
    arrives: SessionEntry | None = None

    async def end_offsets(self) -> dict[int, int]:
        return {0: 1}

    async def reached(self, ends: object) -> None:
        del ends
        if self.arrives is not None:
            self.table.apply(self.arrives)


@dataclass
class Desk:
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)
    table: SessionTable = field(default_factory=SessionTable)
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    engine: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    validate: Callable[[SessionSpec], None] = known_only

    def __post_init__(self) -> None:
        self.elsewhere = Elsewhere(self.table)
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.app: Starlette = assemble(
            CaptureParts(
                settings=CaptureSettings(public_url="https://capture.example/", close_seconds=0.5),
                sessions=self.table,
                position=self.elsewhere,
                announced=AnnouncedVersions(),
                event_writer=self.event_writer,
                upstream=Upstream(client),
                clock=self.clock,
                metrics=Metrics("capture"),
                validate=self.validate,
            )
        )

    async def _answer(self, _: httpx.Request) -> httpx.Response:
        self.called.set()
        await self.engine.wait()
        return httpx.Response(500, json={"error": {"message": "no"}})

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: object) -> tuple[int, Any]:
        async with asyncio.timeout(WAIT), AsgiCall(self.app, method, path, body) as call:
            answer = await call.json()
            return call.status, answer

    @property
    def events(self) -> list[Any]:
        return self.event_writer.of(COMPLETIONS)

    @property
    def entries(self) -> list[SessionEntry]:
        return self.event_writer.of(SESSIONS)


async def test_opening_tells_what_an_agent_needs() -> None:
    resolver = Desk()
    status, opened = await resolver.post("/v1/sessions", {**SPEC, "session_id": "s1"})
    assert status == 201
    assert opened["base_url"] == "https://capture.example/sessions/s1/v1"
    assert len(opened["api_key"]) > 30
    assert resolver.entries[0].token == digest_of(opened["api_key"])
    assert opened["environment"] == {
        "OPENAI_BASE_URL": "https://capture.example/sessions/s1/v1",
        "OPENAI_API_KEY": opened["api_key"],
        "ANTHROPIC_BASE_URL": "https://capture.example/sessions/s1",
        "ANTHROPIC_API_KEY": opened["api_key"],
        "GOOGLE_GEMINI_BASE_URL": "https://capture.example/sessions/s1",
        "GEMINI_API_KEY": opened["api_key"],
        "ROLLMILL_SESSION_ID": "s1",
        "ROLLMILL_TASK_ID": "t1",
    }
    (event,) = resolver.events
    assert event == SessionOpened(session_id="s1", spec=SessionSpec.model_validate(SPEC), at=1000.0)
    assert [item.topic for item in resolver.event_writer.appended] == [COMPLETIONS, SESSIONS]
    assert resolver.entries[0].state is SessionState.OPEN


async def test_without_an_id_capture_chooses_one_each_time() -> None:
    resolver = Desk()
    ids = {(await resolver.post("/v1/sessions"))[1]["session_id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"evaluators": [{"strategy": "nobody"}]}, "unknown evaluator 'nobody'"),
        ({"groupid": "g"}, "did you mean 'group_id'?"),
        ({"zzz": 1}, "known are session_id, attempt"),
        ({"group_size": 0}, "group_size"),
        ({"deadline_seconds": "soon"}, "deadline_seconds"),
        ({"session_id": "a/b"}, "session_id"),
        ({"attempt": 0}, "attempt"),
        ({"policy": "other"}, "policy 'other' is trained by no route"),
        ([], "JSON object"),
        (b"{", "not JSON"),
    ],
)
async def test_a_bad_opening_is_refused_with_advice_and_leaves_no_trace(body: object, words: str) -> None:
    resolver = Desk()
    status, answer = await resolver.post("/v1/sessions", body)
    assert status == 422
    assert words in answer["error"]["message"]
    assert resolver.event_writer.appended == []


async def test_opening_again_is_answered_again_and_another_spec_is_a_conflict() -> None:
    resolver = Desk()
    first = await resolver.post("/v1/sessions", {**SPEC, "session_id": "s1"})
    again = await resolver.post("/v1/sessions", {**SPEC, "session_id": "s1"})
    other = await resolver.post("/v1/sessions", {"session_id": "s1"})
    assert (again[0], again[1]) == (200, first[1])
    assert other[0] == 409
    assert len(resolver.events) == 1


async def test_a_session_that_another_replica_opened_is_found() -> None:
    resolver = Desk()
    resolver.elsewhere.arrives = SessionEntry(
        session_id="s9", state=SessionState.OPEN, spec=SessionSpec(task_id="t9"), opened_at=5.0
    )
    status, shown = await resolver.get("/v1/sessions/s9")
    assert (status, shown["spec"]["task_id"], shown["state"]) == (200, "t9", "open")
    assert (await resolver.post("/v1/sessions", {"session_id": "s9"}))[0] == 409


async def test_a_higher_attempt_takes_a_session_over() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    await resolver.post("/v1/sessions/s1/close")
    assert (await resolver.post("/v1/sessions", {"session_id": "s1"}))[0] == 409
    assert (await resolver.post("/v1/sessions", {"session_id": "s1", "attempt": 2}))[0] == 201
    assert (await resolver.get("/v1/sessions/s1"))[1]["attempt"] == 2
    assert (await resolver.post("/v1/sessions/s1/close", {"attempt": 1}))[0] == 409


async def test_closing_is_recorded_once_and_answered_again_for_equal_content() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    body = {"status": "ERROR", "error": "agent crashed", "output": {"answer": 42}, "reward": 0.0}
    status, closed = await resolver.post("/v1/sessions/s1/close", body)
    assert (status, closed["state"]) == (200, "closed")
    event = resolver.events[-1]
    assert isinstance(event, SessionClosed)
    assert (event.status, event.error, event.reward) == (SessionStatus.ERROR, "agent crashed", 0.0)
    assert event.output == b'{"answer":42}'
    assert (await resolver.post("/v1/sessions/s1/close", body))[0] == 200
    assert (await resolver.post("/v1/sessions/s1/close", {**body, "reward": None}))[0] == 409
    assert [len(resolver.events), len(resolver.entries)] == [2, 2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"status": "DONE"}, "status"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"output": "text"}, "JSON object or array"),
        ({"rewards": 1}, "did you mean 'reward'?"),
    ],
)
async def test_a_bad_close_is_refused_with_advice(body: object, words: str) -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    status, answer = await resolver.post("/v1/sessions/s1/close", body)
    assert status == 422
    assert words in answer["error"]["message"]
    assert resolver.table.get("s1") == resolver.entries[0]


async def test_closing_an_unknown_session_is_404() -> None:
    assert (await Desk().post("/v1/sessions/nobody/close"))[0] == 404


async def test_closing_waits_for_calls_in_flight_and_lets_no_new_one_in() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    ask = {"messages": [{"role": "user", "content": "x"}]}
    chat = "/sessions/s1/v1/chat/completions"
    async with asyncio.timeout(WAIT), AsgiCall(resolver.app, "POST", chat, ask) as call:
        await resolver.called.wait()
        async with AsgiCall(resolver.app, "POST", "/v1/sessions/s1/close") as closing:
            refused = await resolver.post(chat, ask)
            resolver.engine.set()
            assert (await closing.json())["state"] == "closed"
        await call.rest()
    assert refused[0] == 409
    assert [event.type for event in resolver.events] == ["session_opened", "completion", "session_closed"]


async def test_a_call_that_does_not_end_keeps_its_session_open() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    ask: dict[str, Any] = {"messages": []}
    async with asyncio.timeout(WAIT), AsgiCall(resolver.app, "POST", "/sessions/s1/v1/chat/completions", ask) as call:
        await resolver.called.wait()
        status, answer = await resolver.post("/v1/sessions/s1/close")
        assert (status, resolver.table.get("s1")) == (409, resolver.entries[0])
        assert "in flight" in answer["error"]["message"]
        resolver.engine.set()
        await call.rest()
    assert (await resolver.post("/v1/sessions/s1/close"))[0] == 200


async def test_nothing_is_open_or_closed_before_the_log_says_so() -> None:
    resolver = Desk()
    resolver.event_writer.failure = NotAcknowledgedError("no answer")
    assert (await resolver.post("/v1/sessions", {"session_id": "s1"}))[0] == 503
    assert (await resolver.get("/v1/sessions/s1"))[0] == 404
    resolver.event_writer.failure = None
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    resolver.event_writer.failure = NotAcknowledgedError("no answer")
    assert (await resolver.post("/v1/sessions/s1/close"))[0] == 503
    resolver.event_writer.failure = None
    assert (await resolver.get("/v1/sessions/s1"))[1]["state"] == "open"


async def test_what_was_not_acknowledged_is_sent_again_with_the_same_bytes() -> None:
    resolver = Desk()
    for path, body in (("/v1/sessions", {"session_id": "s1", "task_id": "t"}), ("/v1/sessions/s1/close", {})):
        resolver.event_writer.appended.clear()
        resolver.event_writer.doubt = NotAcknowledgedError("late")
        assert (await resolver.post(path, body))[0] == 503
        resolver.clock.advance(20)
        resolver.event_writer.doubt = None
        assert (await resolver.post(path, body))[0] in {200, 201}
        first, again = resolver.events
        assert first == again
        assert resolver.entries[0].opened_at == 1000.0


async def test_another_request_after_a_doubtful_one_is_another_event() -> None:
    resolver = Desk()
    resolver.event_writer.doubt = NotAcknowledgedError("late")
    await resolver.post("/v1/sessions", {"session_id": "s1", "task_id": "t"})
    resolver.clock.advance(20)
    resolver.event_writer.doubt = None
    assert (await resolver.post("/v1/sessions", {"session_id": "s1", "task_id": "u"}))[0] == 201
    assert [(event.spec.task_id, event.at) for event in resolver.events] == [("t", 1000.0), ("u", 1020.0)]


async def test_unknown_paths_and_methods_answer_in_the_same_shape() -> None:
    resolver = Desk()
    assert (await resolver.post("/v2/chat"))[1]["error"]["code"] == 404
    assert (await resolver.get("/v1/sessions/s1/close"))[1]["error"]["code"] == 405


def test_an_echo_of_an_older_entry_does_not_reopen_a_session() -> None:
    table = SessionTable()
    opened = SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0)
    closed = opened.replace(state=SessionState.CLOSED)
    for entry in (opened, closed, opened):
        table.apply(entry)
    assert table.get("s") == closed
    table.apply(opened.replace(attempt=2))
    table.apply(closed)
    assert table.get("s") == opened.replace(attempt=2)
    table.forget("s", None)
    assert len(table) == 0


async def test_idle_is_told_when_the_last_call_leaves() -> None:
    calls = InFlight()
    await calls.wait_until_idle("s")
    with calls.call("s"):
        with calls.call("s"):
            waiting = asyncio.create_task(calls.wait_until_idle("s"))
            await asyncio.sleep(0)
        assert (calls.total, waiting.done()) == (1, False)
    await asyncio.wait_for(waiting, WAIT)
    assert calls.total == 0


async def test_what_another_replica_has_closed_is_not_closed_again_otherwise() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    (opened,) = resolver.entries
    closing = read_close_request({"reward": 1.0}).digest
    resolver.elsewhere.arrives = opened.replace(state=SessionState.CLOSED, closed_at=2.0, closing=closing)
    assert (await resolver.post("/v1/sessions/s1/close", {"reward": 0.0}))[0] == 409
    assert (await resolver.post("/v1/sessions/s1/close", {"reward": 1.0}))[0] == 200
    assert not [event for event in resolver.events if isinstance(event, SessionClosed)]


async def test_what_another_replica_has_opened_is_not_opened_again() -> None:
    resolver = Desk()
    await resolver.post("/v1/sessions", {"session_id": "s1"})
    (opened,) = resolver.entries
    resolver.elsewhere.arrives = opened.replace(attempt=2, spec=SessionSpec(task_id="another"))
    status, answer = await resolver.post("/v1/sessions", {"session_id": "s1", "attempt": 2})
    assert (status, "was opened with another spec" in answer["error"]["message"]) == (409, True)
    assert len(resolver.events) == 1


@pytest.mark.parametrize("name", ["this:X", "unittest.__main__:X", "test.autotest:X", "antigravity:X"])
async def test_f3_a_module_that_a_client_names_is_refused_and_not_imported(name: str) -> None:
    desk = Desk(validate=validate_session_spec)
    module = name.partition(":")[0]
    before = module in sys.modules
    for spec in ({"evaluators": [{"strategy": name}]}, {"builder": {"strategy": name}}):
        status, answer = await desk.post("/v1/sessions", spec)
        assert status == 422
        assert SETTING in str(answer)
    assert (module in sys.modules) == before


@pytest.mark.parametrize("depth", [9, 40, 70])
async def test_f16_evaluators_nested_too_deep_are_422(depth: int) -> None:
    desk = Desk(validate=partial(validate_session_spec, maxima=SpecMaxima()))
    evaluator: dict[str, Any] = {"strategy": "reported"}
    for _ in range(depth - 1):
        evaluator = {"strategy": "composite", "config": {"parts": [evaluator]}}
    status, answer = await desk.post("/v1/sessions", {"evaluators": [evaluator]})
    assert status == 422
    assert any(text in str(answer) for text in ("inside of each other", "nested too deep"))
    assert desk.events == []


@pytest.mark.parametrize("depth", [100, 260, 1000, 5000])
@pytest.mark.parametrize("where", ["metadata", "config"])
async def test_f16_json_that_is_nested_too_deep_is_the_clients_mistake(depth: int, where: str) -> None:
    desk = Desk(validate=validate_session_spec)
    text = '{"v":' * depth + "1" + "}" * depth
    builder = '{"builder":{"strategy":"prefix_merging","config":' + text + "}}"
    body = '{"metadata":' + text + "}" if where == "metadata" else builder
    status, _ = await desk.post("/v1/sessions", body.encode())
    assert status in (201, 400, 413, 422)
