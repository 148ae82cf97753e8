"""What one client sends wrong is set aside, and everything of other clients goes on (rules M3, T6)."""

from __future__ import annotations

from collections import Counter

import orjson
import pytest

from rollmill.codec import header
from rollmill.models import Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.testing.topic_log import dead_letter_info, produce, read, read_all, running
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, EVALUATIONS, TRAJECTORIES
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka


@pytest.fixture
def address(kafka_broker: EmbeddedKafka, topic_prefix: str) -> dict[str, str]:
    return {"bootstrap_servers": kafka_broker.bootstrap_servers, "prefix": topic_prefix}


def reward(session: str, name: str, value: float, **fields: object) -> tuple[str, bytes]:
    made = {"evaluation_id": name, "session_id": session, "evaluator": "human", "outcome_reward": value, "at": 1.0}
    return session, Evaluation.model_validate({**made, **fields}).model_dump_json().encode()


def ended(session: str, *evaluators: str) -> tuple[str, bytes]:
    spec = SessionSpec(evaluators=tuple(EvaluatorSpec(strategy=name) for name in evaluators))
    made = Trajectory(session_id=session, status=SessionStatus.COMPLETED, spec=spec, closed_at=1.0)
    return session, made.model_dump_json().encode()


async def test_f2_wrong_rewards_of_one_client_stop_nobody(address: dict[str, str]) -> None:
    limits = {"partitions": 1, "poll_ms": 20, "timer_seconds": 0.05, "revision_window_seconds": 0.01}
    settings = RewardMergerSettings.model_validate({**address, **limits, "dead_letter_limit": 20})
    await apply_topics(settings)
    conflicts = [reward("many", "same", float(number)) for number in range(115)]
    names = [reward("crowd", f"n{number}", 1.0, evaluator=f"e{number}") for number in range(400)]
    await produce(settings, BUILT, [ended("late", "human")])
    await produce(settings, EVALUATIONS, [reward("late", "first", 1.0), *conflicts, *names])
    async with running(settings, build_merger(settings).stages):
        is_closed = lambda found: sum(record.key == b"late" for record in found) > 1  # noqa: E731
        await read(settings, EVALUATIONS, is_closed)  # the reward, and the timer that ends its revisions
        late = [reward("late", f"later{number}", 0.5) for number in range(120)]
        await produce(settings, EVALUATIONS, late)
        await produce(settings, BUILT, [ended("other", "human")])
        await produce(settings, EVALUATIONS, [reward("other", "theirs", 0.25)])
        await read(settings, TRAJECTORIES, lambda found: any(record.key == b"other" for record in found))
        letters = await read(settings, DEAD_LETTERS, 114 + 144 + 120)
    reasons = Counter(dead_letter_info(letter).reason for letter in letters)
    assert reasons == {"conflict": 114, "too_many_evaluations": 144, "late_evaluation": 120}
    (other,) = [each for each in await read_all(settings, TRAJECTORIES) if each.session_id == "other"]
    assert other.outcome_reward == 0.25


def event(kind: str, session: str = "s", **fields: object) -> bytes:
    return orjson.dumps({"type": kind, "session_id": session, **fields})


async def test_nt01_and_m3_null_headers_and_misplaced_records_at_the_builder(address: dict[str, str]) -> None:
    settings = BuilderSettings.model_validate({**address, "partitions": 2, "poll_ms": 20})
    await apply_topics(settings)
    null = ("traceparent", None)
    headers = (("content-type", b"application/json"), null)
    choice = {"token_ids": [7, 9], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    call = event("completion", completion_id="c", prompt_ids=[1, 2], choices=[choice])
    await produce(settings, COMPLETIONS, [("s", b'{"type": "nonsense"}')], headers=headers)
    await produce(settings, COMPLETIONS, [("another key", call)], headers=headers)
    async with running(settings, build_builder(settings).stages):
        is_rerouted = lambda found: any(header(each.headers, "rerouted") for each in found)  # noqa: E731
        sent = [each for each in await read(settings, COMPLETIONS, is_rerouted) if header(each.headers, "rerouted")]
        await produce(settings, COMPLETIONS, [("s", event("session_closed"))])
        (built,) = await read(settings, BUILT, 1)
        (letter,) = await read(settings, DEAD_LETTERS, 1)
    assert (dead_letter_info(letter).reason, letter.headers[:2]) == ("invalid", headers)
    assert [(each.key, each.headers[1]) for each in sent] == [(b"s", null)]
    assert built.key == b"s"
