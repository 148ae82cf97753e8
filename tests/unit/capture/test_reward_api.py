"""Rewards from people and harnesses, through the HTTP application."""

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from rollmill.errors import BackpressureError
from rollmill.models import Evaluation
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import EVALUATIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WAIT = 5.0
REWARD = "/v1/sessions/s1/reward"


class Desk:
    """Capture with one open session, ``s1``, of the tenant ``a``."""

    def __init__(self, **settings: Any) -> None:
        self.event_writer = MemoryEventWriter()
        self.app = assemble(
            CaptureParts(
                settings=CaptureSettings(**settings),
                sessions=SessionTable(),
                position=CaughtUp(),
                announced=AnnouncedVersions(),
                event_writer=self.event_writer,
                upstream=Upstream(httpx.AsyncClient()),
                clock=ManualClock(1000.0),
                metrics=Metrics("capture"),
            )
        )

    async def open(self, key: str | None = None, **body: Any) -> str:
        _, opened = await self.post("/v1/sessions", {"session_id": "s1", **body}, key)
        return str(opened["api_key"])

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with asyncio.timeout(WAIT), AsgiCall(self.app, "POST", path, body, headers) as call:
            answer = await call.json()
            return call.status, answer

    @property
    def said(self) -> list[Evaluation]:
        return self.event_writer.of(EVALUATIONS)


@pytest.fixture
async def resolver() -> Desk:
    made = Desk()
    await made.open()
    return made


async def test_a_reward_is_an_evaluation_of_the_session(resolver: Desk) -> None:
    status, answer = await resolver.post(
        REWARD, {"reward": 0.0, "components": {"tone": 0.5}, "metadata": {"by": "eve"}}
    )
    (evaluation,) = resolver.said
    assert status == 202
    assert answer == {
        "session_id": "s1",
        "attempt": 1,
        "evaluation_id": evaluation.evaluation_id,
        "evaluator": "human",
    }
    assert (evaluation.outcome_reward, evaluation.components, evaluation.metadata) == (
        0.0,
        {"tone": 0.5},
        {"by": "eve"},
    )
    assert (evaluation.at, evaluation.final, evaluation.repeatable) == (1000.0, False, False)


async def test_a_closed_session_takes_rewards(resolver: Desk) -> None:
    await resolver.post("/v1/sessions/s1/close", {"status": "COMPLETED"})
    status, _ = await resolver.post(REWARD, {"trace_rewards": [1.0, None], "turn_rewards": [[0.5], None]})
    assert status == 202
    assert resolver.said[0].trace_rewards == (1.0, None)
    assert resolver.said[0].turn_rewards == ((0.5,), None)


async def test_saying_the_same_again_is_a_duplicate_and_anything_else_is_not(resolver: Desk) -> None:
    bodies: list[dict[str, Any]] = [
        {"reward": 1.0},
        {"reward": 1.0},
        {"reward": 0.5},
        {"reward": 1.0, "evaluator": "tests"},
        {"reward": 1.0, "evaluation_id": "mine"},
        {"outcome_reward": 0.75, "supersedes": "mine", "evaluator": "tests"},
    ]
    for body in bodies:
        await resolver.post(REWARD, body)
    names = [evaluation.evaluation_id for evaluation in resolver.said]
    assert names[0] == names[1]
    assert len(set(names)) == 5
    assert names[4] == "mine"
    assert resolver.said[5].supersedes == "mine"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({}, "give a `reward`"),
        ({"reward": None}, "give a `reward`"),
        ({"reward": "1.0"}, "outcome_reward"),
        ({"reward": True}, "outcome_reward"),
        ({"reward": 1e39}, "outcome_reward"),
        (b'{"reward": NaN}', "not JSON"),
        (b"[1.0]", "JSON object"),
        ({"reward": 1.0, "outcome_reward": 1.0}, "short for"),
        ({"reward": 1.0, "not_graded": "both"}, "not both"),
        ({"reward": 1.0, "evaluator": "a b"}, "evaluator"),
        ({"reward": 1.0, "final": True}, "final"),
        ({"reward": 1.0, "session_id": "s2"}, "session_id"),
    ],
)
async def test_what_is_no_reward_is_refused_with_advice(resolver: Desk, body: object, complaint: str) -> None:
    status, answer = await resolver.post(REWARD, body)
    assert status == 422
    assert complaint in answer["error"]["message"]
    assert resolver.said == []


async def test_a_grader_can_say_that_there_is_no_grade(resolver: Desk) -> None:
    assert (await resolver.post(REWARD, {"not_graded": "unclear_task"}))[0] == 202
    assert resolver.said[0].not_graded == "unclear_task"


async def test_unknown_sessions_and_attempts_are_refused(resolver: Desk) -> None:
    assert (await resolver.post("/v1/sessions/s2/reward", {"reward": 1.0}))[0] == 404
    assert (await resolver.post(REWARD, {"reward": 1.0, "attempt": 2}))[0] == 409


async def test_a_reward_that_the_log_does_not_take_is_to_be_sent_again(resolver: Desk) -> None:
    resolver.event_writer.failure = NotAcknowledgedError("Kafka is away")
    assert (await resolver.post(REWARD, {"reward": 1.0}))[0] == 503
    resolver.event_writer.failure, resolver.event_writer.full = None, BackpressureError("no room", retry_after=3)
    assert (await resolver.post(REWARD, {"reward": 1.0}))[0] == 503


async def test_where_keys_are_asked_for_the_tenant_grades_and_the_agent_does_not() -> None:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a-key", "b-key")}
    resolver = Desk(api_keys={"a": keys["a-key"], "b": keys["b-key"]})
    token = await resolver.open("a-key")
    statuses = [(await resolver.post(REWARD, {"reward": 1.0}, key))[0] for key in (None, token, "b-key", "a-key")]
    assert statuses == [401, 401, 404, 202]
