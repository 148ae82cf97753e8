"""What a session asks for: builder, evaluators, group, deadlines (validated when it opens)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from rollmill.models.base import FiniteFloat, Identifier, NonNegativeInt, PositiveInt, Record


class Purpose(StrEnum):
    """``train`` is batched; ``eval`` is graded and never batched; ``collect`` is only kept (rule A7)."""

    TRAIN = "train"
    EVAL = "eval"
    COLLECT = "collect"


class RewardRule(StrEnum):
    """How the grades of several evaluators become one reward.

    The mean and the sum use the weights, and like the minimum and the maximum (of each trace by itself) they need a
    grade from each evaluator. ``first`` takes the first graded one in the order of the spec: a fallback. ``last`` takes
    the one that was reported last: a person's after a machine's.
    """

    WEIGHTED_MEAN = "weighted_mean"
    WEIGHTED_SUM = "weighted_sum"
    MIN = "min"
    MAX = "max"
    FIRST = "first"
    LAST = "last"


class StrategySpec(Record):
    """A strategy by registered name or ``module:ClassName``, constructed as ``Class(**config)``."""

    strategy: str = Field(min_length=1)
    config: dict[str, Any] = Field(default_factory=dict)


class EvaluatorSpec(StrategySpec):
    """A required evaluator of a session. ``name`` tells two of one strategy apart."""

    name: Identifier | None = None
    """None: the strategy's name with ``:`` written as ``.``."""
    weight: FiniteFloat = Field(default=1.0, ge=0)
    """In the weighted mean or sum of several evaluators; 0: awaited and kept as provenance, never counted."""

    @property
    def label(self) -> str:
        return self.name or self.strategy.replace(":", ".")


class SessionSpec(Record):
    """Everything known of a session when it opens."""

    task_id: str | None = None
    group_id: Identifier | None = None
    """None: the session is a group of its own."""
    group_size: PositiveInt = 1
    policy: Identifier = "policy"
    purpose: Purpose = Purpose.TRAIN
    dataset: str | None = None
    epoch: NonNegativeInt = 0
    """Pass over the data set, for reports."""
    builder: StrategySpec = StrategySpec(strategy="prefix_merging")
    evaluators: tuple[EvaluatorSpec, ...] = ()
    """Empty: the session is emitted ungraded at once (rule M2)."""
    reward_rule: RewardRule = RewardRule.WEIGHTED_MEAN
    deadline_seconds: FiniteFloat = Field(default=3600.0, gt=0)
    """From opening; then the session is closed as TIMEOUT and partial traces are kept."""
    idle_seconds: FiniteFloat = Field(default=1800.0, gt=0)
    """From the last completion."""
    evaluation_seconds: FiniteFloat = Field(default=1800.0, gt=0)
    """From ``built``; then missing evaluations count as not graded, reason ``deadline``."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _evaluators_are_distinct(self) -> SessionSpec:
        labels = [evaluator.label for evaluator in self.evaluators]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two evaluators share one name: {labels}; set `name` on each")
        return self
