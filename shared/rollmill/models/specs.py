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

    strategy: str = Field(min_length=1, description="Registered name, or `module:ClassName`.")
    config: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the strategy's class.")


class EvaluatorSpec(StrategySpec):
    """A required evaluator of a session. ``name`` tells two of one strategy apart."""

    name: Identifier | None = Field(
        default=None,
        description="Name of this evaluator in the session. Without it: the strategy's name with `:` written as `.`.",
    )
    weight: FiniteFloat = Field(
        default=1.0,
        ge=0,
        description="Weight in the mean or sum of several evaluators; 0: its grade is awaited and kept, never counted.",
    )

    @property
    def label(self) -> str:
        return self.name or self.strategy.replace(":", ".")


class SessionSpec(Record):
    """Everything known of a session when it opens."""

    task_id: str | None = Field(default=None, description="Which task the agent works on; kept with what is trained.")
    group_id: Identifier | None = Field(
        default=None,
        description="The group: its sessions are compared with each other. Without it the session is a group alone.",
    )
    group_size: PositiveInt = Field(
        default=1, description="Sessions that the group will have; the same for all sessions of the group."
    )
    policy: Identifier = Field(default="policy", description="Name of the policy that is trained.")
    purpose: Purpose = Field(
        default=Purpose.TRAIN,
        description="`train`: becomes batches. `eval`: is graded, and never trained. `collect`: is only recorded.",
    )
    dataset: str | None = Field(default=None, description="Name of the data set that the task is from, for reports.")
    epoch: NonNegativeInt = Field(default=0, description="Pass over the data set, for reports.")
    builder: StrategySpec = Field(
        default=StrategySpec(strategy="prefix_merging"), description="How the calls of the session become traces."
    )
    evaluators: tuple[EvaluatorSpec, ...] = Field(
        default=(), description="What grades the session. Empty: it is passed on ungraded at once."
    )
    reward_rule: RewardRule = Field(
        default=RewardRule.WEIGHTED_MEAN, description="How the grades of several evaluators become one reward."
    )
    deadline_seconds: FiniteFloat = Field(
        default=3600.0,
        gt=0,
        description="Seconds from opening; then the session is closed as TIMEOUT, and what it has by then is kept.",
    )
    idle_seconds: FiniteFloat = Field(
        default=1800.0, gt=0, description="Seconds from the last model call; then the session is closed as TIMEOUT."
    )
    evaluation_seconds: FiniteFloat = Field(
        default=1800.0,
        gt=0,
        description="Seconds from the session's end; then missing grades count as not graded, reason `deadline`.",
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict, description="Anything of the caller's; it is kept in the trajectory."
    )

    @model_validator(mode="after")
    def _evaluators_are_distinct(self) -> SessionSpec:
        labels = [evaluator.label for evaluator in self.evaluators]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two evaluators share one name: {labels}; set `name` on each")
        return self
