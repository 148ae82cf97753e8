"""The evaluator ``composite``: several evaluators as one, with the result of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, EvaluatorSpec, Record, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceRequest, evaluator_registry
from rollmill.strategies.foreign_code import contained_await
from rollmill.strategies.maxima import require_countable
from rollmill_evaluator.result_validation import not_graded_result, validated_result
from rollmill_evaluator.retrying import Retries

TRACE_COUNT = "trace_count_mismatch"
INSIDE = "part_with_rewards_inside"
NO_REWARD = "no_reward"


class NotGradedRule(StrEnum):
    """What happens to the whole where a part is not graded."""

    FAIL = "fail"
    """It is not graded, with the part's reason."""
    SKIP = "skip"
    """The weights of the others are normalised to a sum of 1; not graded where none is left."""
    ZERO = "zero"
    """The part counts as 0.0, and the evaluation names it in ``counted_as_zero``."""


class CompositeConfig(Record):
    parts: tuple[EvaluatorSpec, ...] = Field(min_length=1)
    not_graded: NotGradedRule = NotGradedRule.FAIL
    attempts: PositiveInt = Field(default=3, le=10)
    """Tries of a part that fails because of infrastructure."""
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
class PartResult:
    """The result of one part."""

    spec: EvaluatorSpec
    result: EvalResult
    seconds: float

    @property
    def ungraded_reason(self) -> str | None:
        """Why it has no reward; None: it has one."""
        return self.result.not_graded or (None if self.result.has_reward else NO_REWARD)


class CompositeEvaluator(BaseTrajectoryEvaluator):
    """The weighted mean of its parts, which run at the same time; each part's reward is a component.

    Constructed with the fields of `CompositeConfig`, of which ``parts`` are written like a session's evaluators; raises
    ValueError for a config that is none, a part's own included. Parts may give an outcome or one reward per trace.
    """

    version = "1"

    def __init__(self, **config: Any) -> None:
        require_countable([config])
        self._config = CompositeConfig.validate_strictly(config)
        self._parts = [(spec, evaluator_registry().create(spec)) for spec in self._config.parts]
        self.resource_class = max(part.resource_class for _, part in self._parts)

    def requested_resources(self) -> Iterator[ResourceRequest]:
        for index, (_, part) in enumerate(self._parts):
            for request in part.requested_resources():
                yield replace(request, field=f"parts.{index}.config.{request.field}")

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        results = await asyncio.gather(
            *(self._evaluate_part(spec, part, trajectory, context) for spec, part in self._parts)
        )
        return combine(self._config.not_graded, results, len(trajectory.traces))

    async def _evaluate_part(
        self, spec: EvaluatorSpec, part: BaseTrajectoryEvaluator, trajectory: Trajectory, context: EvaluationContext
    ) -> PartResult:
        """Whatever a part raises is its own failure and does not affect the other parts."""
        began = time.perf_counter()

        async def attempt(seconds_left: float) -> EvalResult:
            return validated_result(await part.evaluate(trajectory, replace(context, deadline_seconds=seconds_left)))

        retries = Retries(self._config.attempts, self._config.retry_seconds)
        try:
            result = await contained_await(retries.run(attempt, context.deadline_seconds))
        except Exception as error:  # noqa: BLE001  # foreign code can raise anything, and none of it is a number
            result = not_graded_result(error)
        return PartResult(spec, result, time.perf_counter() - began)


def combine(rule: NotGradedRule, parts: Sequence[PartResult], traces: int) -> EvalResult:
    """The results of all parts as one, by ``rule``; ``traces``: their number. Raises NotGradedError for a bad part."""
    weighted = [part for part in parts if part.spec.weight > 0]
    ungraded = [part for part in weighted if part.ungraded_reason is not None]
    graded = [part for part in weighted if part.ungraded_reason is None]
    metadata: dict[str, Any] = {
        "parts": {part.spec.label: _part_metadata(part) for part in parts},
        "rule": rule.value,
    }
    if ungraded and (rule is NotGradedRule.FAIL or (rule is NotGradedRule.SKIP and not graded)):
        first = ungraded[0]
        return EvalResult(not_graded=first.ungraded_reason, metadata={**metadata, "missing": first.spec.label})
    if rule is NotGradedRule.ZERO and ungraded:
        metadata["counted_as_zero"] = [part.spec.label for part in ungraded]
    counted = weighted if rule is NotGradedRule.ZERO else graded
    # A part that counts as zero in the whole is zero as a component, too: then means of the components are over the
    # same rollouts as the mean of the whole.
    zeros = dict.fromkeys(metadata.get("counted_as_zero", ()), 0.0)
    components = {part.spec.label: part.result.outcome_reward for part in parts} | zeros
    return EvalResult(
        **_rewards(counted, traces),
        components={label: value for label, value in components.items() if value is not None},
        metadata=metadata,
    )


def _part_metadata(part: PartResult) -> dict[str, Any]:
    result = part.result
    return {
        "weight": part.spec.weight,
        "seconds": part.seconds,
        **result.model_dump(mode="json", exclude_none=True),
    }


def _rewards(counted: Sequence[PartResult], traces: int) -> dict[str, Any]:
    for part in counted:
        _require_combinable(part, traces)
    largest = max(part.spec.weight for part in counted)
    total = math.fsum(part.spec.weight / largest for part in counted)
    shares = [part.spec.weight / largest / total for part in counted]
    outcome = _mean(shares, [_outcome(part) for part in counted])
    if all(part.result.trace_rewards is None for part in counted):
        return {"outcome_reward": outcome}
    columns = zip(*(_per_trace(part, traces) for part in counted), strict=True)
    return {"outcome_reward": outcome, "trace_rewards": tuple(_mean(shares, column) for column in columns)}


def _require_combinable(part: PartResult, traces: int) -> None:
    label, result = part.spec.label, part.result
    if result.trace_rewards is not None and len(result.trace_rewards) != traces:
        detail = f"part {label} gave {len(result.trace_rewards)} trace_rewards for {traces} traces"
        raise NotGradedError(TRACE_COUNT, detail)
    if result.turn_rewards is not None or result.token_rewards is not None:
        raise NotGradedError(INSIDE, f"part {label} gives rewards of turns or tokens: name it as an evaluator itself")


def _mean(shares: Sequence[float], values: Sequence[float | None]) -> float | None:
    if any(value is None for value in values):
        return None
    return math.fsum(share * value for share, value in zip(shares, values, strict=True) if value is not None)


def _outcome(part: PartResult) -> float | None:
    return 0.0 if part.ungraded_reason is not None else part.result.outcome_reward


def _per_trace(part: PartResult, traces: int) -> Sequence[float | None]:
    given = part.result.trace_rewards
    return (_outcome(part),) * traces if given is None else given
