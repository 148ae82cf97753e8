"""One evaluator on one trajectory: run under a deadline, retried where that helps. A failure never becomes a number."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, Evaluation, EvaluatorSpec, Trajectory, Verdict, dump_json
from rollmill.models.spec_maxima import SpecMaxima
from rollmill.runtime.telemetry.clock import Clock
from rollmill.strategies import (
    AboveMaximumError,
    BaseTrajectoryEvaluator,
    EvaluationContext,
    StrategyRegistry,
    require_countable,
    require_requests_within,
)
from rollmill.strategies.foreign_code import contained, contained_await
from rollmill_evaluator.result_validation import EVALUATOR_ERROR, INVALID_RESULT, not_graded_result, validated_result
from rollmill_evaluator.retrying import Retries

EVALUATOR_TIMEOUT = "evaluator_timeout"
ABOVE_MAXIMUM = "above_maximum"


@dataclass(frozen=True)
class EvaluationLimits:
    """Limits of one evaluation."""

    seconds: float
    """Longest time, all tries together; a session's ``evaluation_seconds`` can only shorten it."""
    attempts: int
    """Tries, where an evaluator raises RetryableError."""
    retry_seconds: float
    """Wait before the second try; doubled, with jitter, before each further one."""
    bytes: int
    """Of one record on ``evaluations``."""


@dataclass(frozen=True)
class Grader:
    """Turns (trajectory, evaluator spec) into an `Evaluation`. Raises nothing but cancellation."""

    registry: StrategyRegistry[BaseTrajectoryEvaluator]
    limits: EvaluationLimits
    clock: Clock
    context: EvaluationContext = field(default_factory=lambda: EvaluationContext(deadline_seconds=0.0))
    """What every evaluator may use; the deadline is set for each."""
    maxima: SpecMaxima = field(default_factory=SpecMaxima)
    """What a spec asks for beyond them is not graded: one that came by Kafka has passed no check at capture."""

    async def grade(self, trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> Evaluation:
        """The evaluation of ``trajectory``; ``digest``: of its record's content on ``built``."""
        began = time.perf_counter()
        result, version = await self._evaluate(trajectory, spec)
        return Evaluation(
            **{name: getattr(result, name) for name in EvalResult.model_fields},
            evaluation_id=evaluation_id(trajectory, digest, spec),
            session_id=trajectory.session_id,
            attempt=trajectory.attempt,
            evaluator=spec.label,
            repeatable=True,
            version=version,
            duration_seconds=time.perf_counter() - began,
            at=self.clock.now(),
        )

    async def _evaluate(self, trajectory: Trajectory, spec: EvaluatorSpec) -> tuple[EvalResult, str | None]:
        try:
            evaluator = self._create(trajectory, spec)
            version = _version_of(evaluator)
            seconds = min(self.limits.seconds, trajectory.spec.evaluation_seconds)
            return await self._within_deadline(seconds, evaluator, trajectory), version
        except Exception as error:  # noqa: BLE001  # foreign code can raise anything, and none of it is a number
            return not_graded_result(error), None

    def _create(self, trajectory: Trajectory, spec: EvaluatorSpec) -> BaseTrajectoryEvaluator:
        """Raises NotGradedError (``above_maximum``), and what the registry does."""
        try:
            require_countable([each.config for each in trajectory.spec.evaluators], self.maxima)
            evaluator = self.registry.create(spec)
            require_requests_within(evaluator.requested_resources(), self.maxima, "config.")
        except AboveMaximumError as error:
            raise NotGradedError(ABOVE_MAXIMUM, str(error)) from error
        return evaluator

    async def _within_deadline(
        self, seconds: float, evaluator: BaseTrajectoryEvaluator, trajectory: Trajectory
    ) -> EvalResult:
        """The result within ``seconds``. A TimeoutError of the evaluator itself is its error; ours is its timeout."""
        try:
            async with asyncio.timeout(seconds) as deadline:
                result = await contained_await(self._with_retries(evaluator, trajectory, seconds))
                with contained():
                    return validated_result(result)
        except TimeoutError as error:
            if deadline.expired():
                return EvalResult(
                    not_graded=EVALUATOR_TIMEOUT, verdict=Verdict.NOT_GRADED, metadata={"seconds": seconds}
                )
            return not_graded_result(error, EVALUATOR_ERROR)

    async def _with_retries(
        self, evaluator: BaseTrajectoryEvaluator, trajectory: Trajectory, seconds: float
    ) -> EvalResult:
        async def attempt(seconds_left: float) -> EvalResult:
            return await evaluator.evaluate(trajectory, replace(self.context, deadline_seconds=seconds_left))

        return await Retries(self.limits.attempts, self.limits.retry_seconds).run(attempt, seconds)


def evaluation_id(trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> str:
    """Equal for the same evaluator on the same record, so that a repeat is a duplicate (rule V1)."""
    content = [trajectory.session_id, trajectory.attempt, digest, _content(spec)]
    return hashlib.blake2b(dump_json(content), digest_size=16).hexdigest()


def _content(spec: EvaluatorSpec) -> Any:
    """Its name alone where a config is too deep to be written: the record's digest is in the id, too."""
    try:
        return spec.model_dump(mode="json")
    except ValueError:
        return spec.label


def _version_of(evaluator: BaseTrajectoryEvaluator) -> str | None:
    with contained():
        version = getattr(evaluator, "version", None)
        return None if version is None else str(version)


def encode_evaluation(evaluation: Evaluation, limit: int) -> bytes:
    """JSON of an evaluation in at most ``limit`` bytes.

    NumPy numbers in the metadata become JSON numbers. Metadata that is too large or has no JSON form is replaced by a
    note, and the grade is kept; a grade that is too large by itself becomes not graded (``invalid_result``).
    """
    for version in (evaluation, _without_metadata(evaluation), _too_large(evaluation, limit)):
        encoded = _as_json(version)
        if encoded is not None and len(encoded) <= limit:
            return encoded
    raise ValueError(f"no evaluation fits into {limit} bytes")


def _as_json(evaluation: Evaluation) -> bytes | None:
    try:
        with contained():
            return orjson.dumps(evaluation.model_dump(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except Exception:  # noqa: BLE001  # what the metadata holds is foreign code's, and may contain itself
        return None


def _without_metadata(evaluation: Evaluation) -> Evaluation:
    return evaluation.replace(metadata={"dropped": "the evaluator's metadata is too large or has no JSON form"})


def _too_large(evaluation: Evaluation, limit: int) -> Evaluation:
    return evaluation.replace(
        outcome_reward=None,
        trace_rewards=None,
        turn_rewards=None,
        token_rewards=None,
        components=None,
        not_graded=INVALID_RESULT,
        verdict=Verdict.NOT_GRADED,
        metadata={"error": f"the result is larger than {limit} bytes"},
    )
