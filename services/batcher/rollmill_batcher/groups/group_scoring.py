"""Rewards by a group scorer: every rollout graded against the others when its group is evaluated (rule A6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from rollmill.errors import NotGradedError
from rollmill.models import Trajectory
from rollmill.strategies import BaseGroupScorer
from rollmill.strategies.foreign_code import contained, describe
from rollmill_batcher.groups.group import RolloutGroup

NOT_SCORED = "group_scorer"
FAILED = "group_scorer_failed"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Scoring:
    """The group scorer of a run, with the name that the settings give it."""

    name: str
    scorer: BaseGroupScorer

    def score(self, group: RolloutGroup) -> tuple[Trajectory, ...]:
        """The group's current members with the scorer's rewards in place of those of their evaluators.

        Where the scorer raises, or does not return a finite number or None for each, none of them is graded.
        """
        members = group.current
        try:
            rewards = self._rewards([member for member in members if member.traces])
        except NotGradedError as error:
            log.warning("a group is not graded", group=group.group_id, scorer=self.name, error=str(error))
            return tuple(with_reward(member, None, error.reason) for member in members)
        return tuple(with_reward(member, rewards.get(member.session_id)) for member in members)

    def _rewards(self, members: Sequence[Trajectory]) -> dict[str, float | None]:
        try:
            with contained():
                scores = [None if reward is None else float(reward) for reward in self.scorer.score(members)]
        except Exception as error:  # a third party's scorer can raise anything
            raise NotGradedError(FAILED, describe(error)) from error
        if len(scores) != len(members) or not all(score is None or math.isfinite(score) for score in scores):
            raise NotGradedError(FAILED, f"it gave {scores} for {len(members)} members")
        return dict(zip((member.session_id for member in members), scores, strict=True))


def with_reward(member: Trajectory, reward: float | None, reason: str = NOT_SCORED) -> Trajectory:
    """``member`` with ``reward`` for all of its traces and none at single tokens; None: not graded, for ``reason``."""
    only = {"reward": reward, "token_rewards": None}
    return member.model_copy(
        update={
            "evaluation": None if reward is None else {"outcome_reward": reward},
            "ungraded_reason": reason if reward is None else None,
            "traces": tuple(trace.model_copy(update=only) for trace in member.traces),
        }
    )
