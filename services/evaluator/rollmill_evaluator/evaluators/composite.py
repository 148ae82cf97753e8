"""The evaluator ``composite``: several evaluators as one, with what each of them said."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, EvaluatorSpec, Record, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, evaluator_registry
from rollmill_evaluator.result_validation import checked, named
from rollmill_evaluator.retrying import Retries

TRACE_COUNT = "trace_count_mismatch"
INSIDE = "part_with_rewards_inside"
NO_REWARD = "no_reward"


class Missing(StrEnum):
    """What becomes of the whole where a part is not graded."""

    FAIL = "fail"
    """It is not graded, with the part's reason."""
    SKIP = "skip"
    """The weights of the others are made to sum to 1; not graded where none is left."""
    ZERO = "zero"
    """The part counts as 0.0, and the evaluation names it in ``counted_as_zero``."""


class CompositeConfig(Record):
    parts: tuple[EvaluatorSpec, ...] = Field(min_length=1)
    not_graded: Missing = Missing.FAIL
    attempts: PositiveInt = Field(default=3, le=10)
    """Tries of a part whose infrastructure fails."""
    retry_seconds: float = Field(default=0.5, ge=0)

    @model_validator(mode="after")
    def _countable(self) -> Self:
        labels = [part.label for part in self.parts]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two parts share one name: {labels}; set `name` on each")
        if not any(part.weight > 0 for part in self.parts):
            raise ValueError("one part at least needs a weight above 0")
        return self


@dataclass(frozen=True)
class Answer:
    """What a part said."""

    spec: EvaluatorSpec
    result: EvalResult
    seconds: float

    @property
    def why_not(self) -> str | None:
        """Why it has no reward; None: it has one."""
        return self.result.not_graded or (None if self.result.has_reward else NO_REWARD)


class CompositeEvaluator(BaseTrajectoryEvaluator):
    """The weighted mean of its parts, which run at the same time; each part's reward is a component.

    Constructed with the fields of `CompositeConfig`, of which ``parts`` are written like a session's evaluators; raises
    ValueError for a config that is none, a part's own included. Parts may give an outcome or one reward per trace.
    """

    version = "1"

    def __init__(self, **config: Any) -> None:
        self._config = CompositeConfig.model_validate(config)
        self._parts = [(spec, evaluator_registry().create(spec)) for spec in self._config.parts]
        self.resource_class = max(part.resource_class for _, part in self._parts)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        answers = await asyncio.gather(*(self._ask(spec, part, trajectory, context) for spec, part in self._parts))
        return combined(self._config.not_graded, answers, len(trajectory.traces))

    async def _ask(
        self, spec: EvaluatorSpec, part: BaseTrajectoryEvaluator, trajectory: Trajectory, context: EvaluationContext
    ) -> Answer:
        """Whatever a part raises is its own failure, and not that of the others."""
        began = time.perf_counter()

        async def attempt(left: float) -> EvalResult:
            return checked(await part.evaluate(trajectory, replace(context, deadline_seconds=left)))

        retries = Retries(self._config.attempts, self._config.retry_seconds)
        try:
            result = await retries.run(attempt, context.deadline_seconds)
        except Exception as error:  # noqa: BLE001  # foreign code can raise anything, and none of it is a number
            result = named(error)
        return Answer(spec, result, time.perf_counter() - began)


def combined(missing: Missing, answers: Sequence[Answer], traces: int) -> EvalResult:
    """One result of all. Raises NotGradedError where the rule says so."""
    weighty = [answer for answer in answers if answer.spec.weight > 0]
    absent = [answer for answer in weighty if answer.why_not is not None]
    graded = [answer for answer in weighty if answer.why_not is None]
    metadata: dict[str, Any] = {
        "parts": {answer.spec.label: _told(answer) for answer in answers},
        "rule": missing.value,
    }
    if absent and (missing is Missing.FAIL or (missing is Missing.SKIP and not graded)):
        first = absent[0]
        return EvalResult(not_graded=first.why_not, metadata={**metadata, "missing": first.spec.label})
    if missing is Missing.ZERO and absent:
        metadata["counted_as_zero"] = [answer.spec.label for answer in absent]
    counting = weighty if missing is Missing.ZERO else graded
    # A part that the whole counts as zero is zero here too: means of parts are over the rollouts that the mean of the
    # whole is over.
    zeros = dict.fromkeys(metadata.get("counted_as_zero", ()), 0.0)
    components = {answer.spec.label: answer.result.outcome_reward for answer in answers} | zeros
    return EvalResult(
        **_rewards(counting, traces),
        components={label: value for label, value in components.items() if value is not None},
        metadata=metadata,
    )


def _told(answer: Answer) -> dict[str, Any]:
    result = answer.result
    return {
        "weight": answer.spec.weight,
        "seconds": answer.seconds,
        **result.model_dump(mode="json", exclude_none=True),
    }


def _rewards(counting: Sequence[Answer], traces: int) -> dict[str, Any]:
    for answer in counting:
        _refuse_unfit(answer, traces)
    largest = max(answer.spec.weight for answer in counting)
    total = math.fsum(answer.spec.weight / largest for answer in counting)
    shares = [answer.spec.weight / largest / total for answer in counting]
    outcome = _mean(shares, [_outcome(answer) for answer in counting])
    if all(answer.result.trace_rewards is None for answer in counting):
        return {"outcome_reward": outcome}
    columns = zip(*(_per_trace(answer, traces) for answer in counting), strict=True)
    return {"outcome_reward": outcome, "trace_rewards": tuple(_mean(shares, column) for column in columns)}


def _refuse_unfit(answer: Answer, traces: int) -> None:
    label, result = answer.spec.label, answer.result
    if result.trace_rewards is not None and len(result.trace_rewards) != traces:
        detail = f"part {label} gave {len(result.trace_rewards)} trace_rewards for {traces} traces"
        raise NotGradedError(TRACE_COUNT, detail)
    if result.turn_rewards is not None or result.token_rewards is not None:
        raise NotGradedError(INSIDE, f"part {label} gives rewards of turns or tokens: name it as an evaluator itself")


def _mean(shares: Sequence[float], values: Sequence[float | None]) -> float | None:
    if any(value is None for value in values):
        return None
    return math.fsum(share * value for share, value in zip(shares, values, strict=True) if value is not None)


def _outcome(answer: Answer) -> float | None:
    return 0.0 if answer.why_not is not None else answer.result.outcome_reward


def _per_trace(answer: Answer, traces: int) -> Sequence[float | None]:
    given = answer.result.trace_rewards
    return (_outcome(answer),) * traces if given is None else given
