"""Evaluations: what graders say of a session (topic ``evaluations``). No reward is never 0.0."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rollmill.models.base import EventTime, FiniteFloat, Identifier, PositiveInt, Record


class EvalResult(Record):
    """What an evaluator returns: rewards, or ``not_graded`` with a reason.

    Numbers as text, booleans, NaN and the infinities are refused. ``trace_rewards`` needs one entry per trace and
    wins over ``outcome_reward`` for the traces; a None entry leaves that trace ungraded. Both None and no
    ``not_graded`` is a grader without an opinion: rewards stay None.
    """

    outcome_reward: FiniteFloat | None = None
    trace_rewards: tuple[FiniteFloat | None, ...] | None = None
    not_graded: str | None = None
    """Reason code of an infrastructure failure, deadline or refusal; never a number."""
    components: dict[str, FiniteFloat] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _graded_or_not(self) -> Self:
        if self.not_graded is not None and (self.outcome_reward is not None or self.trace_rewards is not None):
            raise ValueError("a result is graded or not_graded, not both")
        return self


class Evaluation(EvalResult):
    """An `EvalResult` on the log. The same ``evaluation_id`` again is a duplicate; a revision has a new one."""

    evaluation_id: Identifier
    session_id: Identifier
    attempt: PositiveInt = 1
    evaluator: Identifier
    """Label of the evaluator spec that it answers, or any name for an external grader."""
    supersedes: Identifier | None = None
    """The evaluation that this one revises; None for a first word."""
    final: bool = False
    """True only in the deadline's own record: stop waiting for whatever is missing."""
    version: str | None = None
    duration_seconds: FiniteFloat | None = Field(default=None, ge=0)
    at: EventTime = 0.0
