"""Rewards by a group scorer: every rollout graded against the others when its group is evaluated (rule A6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.errors import ConfigurationError
from rollmill.models import Trajectory
from rollmill.strategies import BaseGroupScorer
from rollmill.strategies.foreign_code import contained, describe
from rollmill_batcher.groups.group import RolloutGroup

NOT_SCORED = "group_scorer"


@dataclass(frozen=True)
class Scoring:
    """The group scorer of a run, with the name that the settings give it."""

    name: str
    scorer: BaseGroupScorer

    def score(self, group: RolloutGroup) -> tuple[Trajectory, ...]:
        """The group's current members with the scorer's rewards in place of those of their evaluators.

        Raises ConfigurationError where the scorer raises, or does not return a finite number or None for each.
        """
        members = group.current
        rewards = self._rewards(group, [member for member in members if member.traces])
        return tuple(with_reward(member, rewards.get(member.session_id)) for member in members)

    def _rewards(self, group: RolloutGroup, members: Sequence[Trajectory]) -> dict[str, float | None]:
        try:
            with contained():
                scores = [None if reward is None else float(reward) for reward in self.scorer.score(members)]
        except Exception as error:  # a third party's scorer can raise anything
            raise ConfigurationError(
                f"group scorer {self.name!r} failed at {group.group_id!r}: {describe(error)}"
            ) from error
        if len(scores) != len(members) or not all(score is None or math.isfinite(score) for score in scores):
            raise ConfigurationError(
                f"group scorer {self.name!r} gave {scores} for the {len(members)} members of {group.group_id!r}"
            )
        return dict(zip((member.session_id for member in members), scores, strict=True))


def with_reward(member: Trajectory, reward: float | None) -> Trajectory:
    """``member`` with ``reward`` for all of its traces and none at single tokens; None: it is not graded."""
    only = {"reward": reward, "token_rewards": None}
    return member.model_copy(
        update={
            "evaluation": None if reward is None else {"outcome_reward": reward},
            "ungraded_reason": NOT_SCORED if reward is None else None,
            "traces": tuple(trace.model_copy(update=only) for trace in member.traces),
        }
    )
