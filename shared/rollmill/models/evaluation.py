"""Evaluations: what graders say of a session (topic ``evaluations``). No reward is never 0.0."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from rollmill.models.base import EventTime, FiniteFloat, Identifier, PositiveInt, Record, Reward


class Verdict(StrEnum):
    """What became of what a session handed in, beside its reward.

    ``failed_to_apply``, ``empty_patch`` and ``timed_out`` are the session's own doing: the evaluator's config says
    what reward each carries, or that it carries none. ``not_graded`` is infrastructure and never carries one.
    """

    GRADED = "graded"
    FAILED_TO_APPLY = "failed_to_apply"
    EMPTY_PATCH = "empty_patch"
    TIMED_OUT = "timed_out"
    NOT_GRADED = "not_graded"


class EvalResult(Record):
    """What an evaluator returns: rewards, or ``not_graded`` with a reason.

    Numbers as text, booleans, NaN, the infinities and what float32 cannot hold are refused. ``trace_rewards`` needs
    one entry per trace and wins over ``outcome_reward`` for the traces; a None entry leaves that trace ungraded.
    Nothing at all and no ``not_graded`` is a grader without an opinion: rewards stay None.

    ``turn_rewards`` and ``token_rewards`` say where in a trace more reward was earned, on top of the other two: they
    become the traces' ``token_rewards``. Alone, their sum is the trace's reward.
    """

    outcome_reward: Reward | None = Field(default=None, description="Reward of the whole session.")
    trace_rewards: tuple[Reward | None, ...] | None = Field(
        default=None,
        description="One reward per trace, in place of `outcome_reward`; null leaves that trace ungraded.",
    )
    turn_rewards: tuple[tuple[Reward | None, ...] | None, ...] | None = Field(
        default=None,
        description="Per trace, one reward per turn, given at the turn's last token. null: nothing there.",
    )
    token_rewards: tuple[tuple[Reward, ...] | None, ...] | None = Field(
        default=None, description="Per trace, one reward per response token. null: nothing there."
    )
    not_graded: str | None = Field(
        default=None,
        description="Why there is no reward: the reason code of an infrastructure failure, a deadline or a refusal.",
    )
    verdict: Verdict | None = Field(
        default=None,
        description="What became of what the session handed in. Without it: no more is known than the reward.",
    )
    components: dict[str, FiniteFloat] | None = Field(
        default=None, description="Parts of the reward by name, for reports."
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict, description="Anything of the grader's; it is kept with the evaluation."
    )

    @model_validator(mode="after")
    def _graded_or_not(self) -> Self:
        if self.not_graded is not None and self.has_reward:
            raise ValueError("a result is graded or not_graded, not both")
        if self.verdict is Verdict.GRADED and self.not_graded is not None:
            raise ValueError("verdict graded contradicts not_graded")
        if self.verdict is Verdict.NOT_GRADED and self.not_graded is None:
            raise ValueError("verdict not_graded needs a reason in not_graded")
        return self

    @property
    def has_reward(self) -> bool:
        """False: no reward of any kind is given."""
        given = (self.outcome_reward, self.trace_rewards, self.turn_rewards, self.token_rewards)
        return any(rewards is not None for rewards in given)


class Evaluation(EvalResult):
    """An `EvalResult` on the log. The same ``evaluation_id`` again is a duplicate; a revision has a new one."""

    evaluation_id: Identifier
    session_id: Identifier
    attempt: PositiveInt = 1
    evaluator: Identifier
    """Label of the evaluator spec that it answers, or any name for an external grader."""
    supersedes: Identifier | None = None
    """The evaluation that this one revises; None for a first evaluation."""
    final: bool = False
    """True only in the deadline's own record: stop waiting for whatever is missing."""
    repeatable: bool = False
    """True: the id names the work and not its result, and who repeats the work may come to another result (rule V1);
    the first one counts. False: the same id with another result is a conflict."""
    version: str | None = None
    duration_seconds: FiniteFloat | None = Field(default=None, ge=0)
    at: EventTime = 0.0
