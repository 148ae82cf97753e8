"""Evaluators by name, under deadline and retries; their failures are reasons, never numbers."""

import asyncio
import math
import sys
from typing import Any

import numpy as np
import orjson
import pytest

from rollmill.codec import encode
from rollmill.errors import RetryableError
from rollmill.models import (
    EvalResult,
    Evaluation,
    EvaluatorSpec,
    SessionSpec,
    SessionStatus,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, StrategyRegistry, evaluator_registry
from rollmill.topics import partition_of
from rollmill_evaluator.consumer.in_flight import ReceivedRecord
from rollmill_evaluator.delivery.record_handler import RecordHandler
from rollmill_evaluator.grading import EvaluationLimits, Grader, encode_evaluation, evaluation_id

LIMITS = EvaluationLimits(seconds=5.0, attempts=3, retry_seconds=0.0, bytes=2000)


class Scripted(BaseTrajectoryEvaluator):
    """Does what its config says."""

    version = 3

    def __init__(self, does: str, times: int = 0) -> None:
        self.does, self.times = does, times

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        assert 0 < context.deadline_seconds <= LIMITS.seconds
        if self.does == "retry" and self.times > 0:
            self.times -= 1
            raise RetryableError("the judge is busy")
        result: EvalResult = await _act(self.does, trajectory)
        return result


async def _act(does: str, trajectory: Trajectory) -> Any:
    if does == "raise":
        raise ValueError("no patch found")
    if does == "own_timeout":
        raise TimeoutError("the sandbox did not answer")
    if does == "cancel":
        raise asyncio.CancelledError
    if does == "exit":
        sys.exit(3)
    if does == "hang":
        await asyncio.Event().wait()
    results: dict[str, Any] = {
        "nan": lambda: EvalResult(outcome_reward=math.nan),
        "unchecked": lambda: EvalResult.model_construct(outcome_reward=math.inf),
        "number": lambda: 1.0,
        "nothing": lambda: None,
        "per_trace": lambda: EvalResult(trace_rewards=(0.5,) * len(trajectory.traces)),
    }
    return results.get(does, lambda: EvalResult(outcome_reward=0.5))()


def grader(**changes: Any) -> Grader:
    registry = StrategyRegistry[BaseTrajectoryEvaluator]("evaluator", BaseTrajectoryEvaluator, {"scripted": Scripted})  # type: ignore[type-abstract]  # only for subclass checks
    return Grader(registry, EvaluationLimits(**{**vars(LIMITS), **changes}), ManualClock(100.0))


def session(*specs: EvaluatorSpec, **changes: Any) -> Trajectory:
    values = {"status": SessionStatus.COMPLETED, "spec": SessionSpec(evaluators=specs), **changes}
    return Trajectory(session_id="s1", **values)


async def graded(does: str, *, times: int = 0, **limits: Any) -> Evaluation:
    spec = EvaluatorSpec(strategy="scripted", config={"does": does, "times": times})
    return await grader(**limits).grade(session(), "digest", spec)


@pytest.mark.parametrize("status", list(TrajectoryStatus))
async def test_session_completed(status: SessionStatus) -> None:
    evaluator = evaluator_registry().create(EvaluatorSpec(strategy="session_completed"))
    result = await evaluator.evaluate(session(status=status), EvaluationContext(deadline_seconds=1.0))
    assert result == EvalResult(outcome_reward=1.0 if status is SessionStatus.COMPLETED else 0.0)


@pytest.mark.parametrize("reward", [0.0, -0.5, 1.0])
async def test_reported_is_what_the_caller_said(reward: float) -> None:
    evaluator = evaluator_registry().create(EvaluatorSpec(strategy="reported"))
    result = await evaluator.evaluate(session(reported_reward=reward), EvaluationContext(deadline_seconds=1.0))
    assert result == EvalResult(outcome_reward=reward)


async def test_reported_without_a_report_is_not_graded() -> None:
    evaluator = evaluator_registry().create(EvaluatorSpec(strategy="reported"))
    result = await evaluator.evaluate(session(), EvaluationContext(deadline_seconds=1.0))
    assert result == EvalResult(not_graded="not_reported")


async def test_a_grade_says_who_what_and_when() -> None:
    evaluation = await graded("grade")
    assert (evaluation.outcome_reward, evaluation.evaluator, evaluation.version) == (0.5, "scripted", "3")
    assert (evaluation.session_id, evaluation.attempt, evaluation.at) == ("s1", 1, 100.0)
    assert evaluation.duration_seconds is not None
    assert not evaluation.final


@pytest.mark.parametrize("does", ["raise", "own_timeout", "cancel", "exit"])
async def test_an_exception_is_not_a_number(does: str) -> None:
    evaluation = await graded(does)
    assert (evaluation.not_graded, evaluation.outcome_reward) == ("evaluator_error", None)
    assert evaluation.metadata["error"]


@pytest.mark.parametrize("does", ["nan", "unchecked", "number", "nothing"])
async def test_an_invalid_result_is_not_a_number(does: str) -> None:
    evaluation = await graded(does)
    assert (evaluation.not_graded, evaluation.outcome_reward) == ("invalid_result", None)


@pytest.mark.parametrize(
    "spec",
    [
        EvaluatorSpec(strategy="nobody"),
        EvaluatorSpec(strategy="no.such.module:Judge"),
        EvaluatorSpec(strategy="scripted", config={"does": "grade", "unknown": 1}),
    ],
)
async def test_an_evaluator_that_cannot_be_made_is_not_a_number(spec: EvaluatorSpec) -> None:
    evaluation = await grader().grade(session(), "digest", spec)
    assert evaluation.not_graded == "evaluator_error"
    assert "evaluator" in evaluation.metadata["error"]


async def test_the_deadline_is_the_services_or_the_sessions_whichever_is_sooner() -> None:
    assert (await graded("hang", seconds=0.1)).not_graded == "evaluator_timeout"
    spec = EvaluatorSpec(strategy="scripted", config={"does": "hang"})
    hurried = session(spec=SessionSpec(evaluation_seconds=0.01))
    assert (await grader().grade(hurried, "digest", spec)).not_graded == "evaluator_timeout"


@pytest.mark.parametrize(("times", "reward", "reason"), [(2, 0.5, None), (3, None, "evaluator_error")])
async def test_only_what_may_pass_is_tried_again_and_not_for_ever(
    times: int, reward: float | None, reason: str | None
) -> None:
    evaluation = await graded("retry", times=times)
    assert (evaluation.outcome_reward, evaluation.not_graded) == (reward, reason)


async def test_cancelling_a_grade_cancels_it() -> None:
    task = asyncio.create_task(graded("hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_id_tells_session_attempt_record_and_spec_apart() -> None:
    spec = EvaluatorSpec(strategy="scripted", config={"does": "grade"})
    same = {evaluation_id(session(), "d", spec), evaluation_id(session(reported_reward=1.0), "d", spec.model_copy())}
    others = {
        evaluation_id(session(attempt=2), "d", spec),
        evaluation_id(session(), "e", spec),
        evaluation_id(session(), "d", EvaluatorSpec(strategy="scripted", config={"does": "raise"})),
        evaluation_id(session(), "d", EvaluatorSpec(strategy="scripted", config={"does": "grade"}, name="second")),
    }
    assert len(same) == 1
    assert len(others | same) == 5


def evaluation(**changes: Any) -> Evaluation:
    values = {"outcome_reward": 0.5, **changes}
    return Evaluation(evaluation_id="e1", session_id="s1", evaluator="judge", **values)


# B097
def test_numpy_numbers_in_metadata_are_json_numbers() -> None:
    found = {"n": np.int64(3), "x": np.float32(0.5), "a": np.array([1, 2])}
    assert orjson.loads(encode_evaluation(evaluation(metadata=found), 2000))["metadata"] == {
        "n": 3,
        "x": 0.5,
        "a": [1, 2],
    }


def _loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    return loop


@pytest.mark.parametrize("metadata", [{"log": "x" * 5000}, {"what": object()}, _loop()])
def test_metadata_that_cannot_travel_is_dropped_and_the_grade_stays(metadata: dict[str, Any]) -> None:
    sent = Evaluation.model_validate(orjson.loads(encode_evaluation(evaluation(metadata=metadata), 2000)))
    assert sent.outcome_reward == 0.5
    assert "dropped" in sent.metadata


def test_a_grade_that_cannot_travel_is_an_invalid_result() -> None:
    sent = Evaluation.model_validate(orjson.loads(encode_evaluation(evaluation(trace_rewards=(0.5,) * 2000), 2000)))
    assert (sent.not_graded, sent.outcome_reward, sent.trace_rewards) == ("invalid_result", None, None)


class Answered:
    """An `RecordHandler` whose log is a list."""

    def __init__(self, **limits: Any) -> None:
        self.log: list[tuple[str, Evaluation]] = []
        self.metrics = Metrics("evaluator")
        self.handler = RecordHandler(grader(**limits), self.publish, self.metrics, partitions=4, concurrency=2)

    async def publish(self, session_id: str, value: bytes) -> None:
        self.log.append((session_id, Evaluation.model_validate(orjson.loads(value))))

    async def answer(self, value: bytes | None, *, partition: int | None = None) -> None:
        home = partition_of(b"s1", 4)
        await self.handler.handle(ReceivedRecord(home if partition is None else partition, 0, value, ()))

    def counted(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"rollmill_{name}_total")


async def test_a_record_is_answered_by_every_evaluator_of_its_spec() -> None:
    answered = Answered()
    specs = [
        EvaluatorSpec(strategy="scripted", config={"does": does}, name=f"e-{does}")
        for does in ("grade", "raise", "nan", "per_trace")
    ]
    await answered.answer(encode(session(*specs)))
    said = {evaluation.evaluator: evaluation for _, evaluation in answered.log}
    assert {name: item.not_graded for name, item in said.items()} == {
        "e-grade": None,
        "e-raise": "evaluator_error",
        "e-nan": "invalid_result",
        "e-per_trace": None,
    }
    assert said["e-per_trace"].trace_rewards == ()
    assert {session_id for session_id, _ in answered.log} == {"s1"}


async def test_the_same_record_again_gives_the_same_ids() -> None:
    answered = Answered()
    value = encode(session(EvaluatorSpec(strategy="scripted", config={"does": "grade"})))
    await answered.answer(value)
    await answered.answer(value)
    first, second = (evaluation.evaluation_id for _, evaluation in answered.log)
    assert first == second


@pytest.mark.parametrize("value", [None, b"{broken", b"\x81"])
async def test_an_unreadable_record_is_left_to_the_merger(value: bytes | None) -> None:
    answered = Answered()
    await answered.answer(value)
    assert answered.log == []
    assert answered.counted("unreadable_records") == 1


async def test_a_misplaced_record_is_left_to_the_merger() -> None:
    answered = Answered()
    value = encode(session(EvaluatorSpec(strategy="scripted", config={"does": "grade"})))
    await answered.answer(value, partition=(partition_of(b"s1", 4) + 1) % 4)
    assert answered.log == []
    assert answered.counted("misplaced_records") == 1


async def test_a_session_without_evaluators_needs_no_answer() -> None:
    answered = Answered()
    await answered.answer(encode(session()))
    assert answered.log == []
