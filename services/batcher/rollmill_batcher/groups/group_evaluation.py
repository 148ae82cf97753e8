"""A group at a cut: its state, which follows from members, configuration and time, and the verdicts on its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollmill.errors import ConfigurationError
from rollmill.models import Trajectory
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.eligibility import EligibilityCriteria, MemberVerdict, evaluate_member, is_counted
from rollmill_batcher.groups.group import GroupEvent, GroupState, RolloutGroup, next_state
from rollmill_batcher.groups.group_scoring import FAILED, Scoring, with_reward

GROUP_EXPIRED = "group_expired"
GROUP_TOO_SMALL = "group_too_small"
ZERO_VARIANCE = "zero_variance"
SUPERSEDED = "superseded"

MOST_FAILED = 10
"""Groups one after the other that a group scorer may fail at: more of them are no fault of a group's content."""


@dataclass(frozen=True)
class CutContext:
    """What the state of a group depends on at a cut. ``closing``: the input has ended, so every deadline has passed."""

    now: float
    criteria: EligibilityCriteria
    closing: bool = False


@dataclass(frozen=True)
class EvaluatedGroup:
    """A group with its members' verdicts. ``reason``: of traces that have no reason of their own."""

    group: RolloutGroup
    state: GroupState
    members: tuple[MemberVerdict, ...]
    reason: str | None = None

    @property
    def rewards(self) -> list[float]:
        """Of the members that count, in the order of their ids."""
        return [m.reward for m in self.members if m.counts and m.reward is not None]

    @property
    def failures(self) -> dict[str, int]:
        """Members that do not count, by reason."""
        return dict(sorted(Counter(member.failure for member in self.members if member.failure).items()))

    @property
    def tokens(self) -> int:
        """Prompts and responses of the traces that train."""
        traces = (verdict.trace for member in self.members for verdict in member.trained)
        return sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)

    @property
    def has_equal_rewards(self) -> bool:
        """Two rewards or more, and all are equal: comparing them teaches nothing."""
        return len(self.rewards) > 1 and bool(np.ptp(self.rewards) == 0)

    @property
    def trains(self) -> bool:
        return any(member.trained for member in self.members)

    def after(self, event: GroupEvent, reason: str | None = None) -> EvaluatedGroup:
        return EvaluatedGroup(self.group, next_state(self.state, event), self.members, reason)


def state_of(group: RolloutGroup, context: CutContext, config: BatcherConfig) -> GroupState:
    """Open, ready or expired. Staleness does not matter here; `grows_stale` decides whether it closes a group early."""
    event = _event(group, context, config)
    return GroupState.OPEN if event is None else next_state(GroupState.OPEN, event)


def grows_stale(group: RolloutGroup, context: CutContext, config: BatcherConfig) -> bool:
    """An open group with at least min-k that is inside the limit at this cut, and no longer at the next one."""
    if not config.groups.close_before_stale or _is_young(group, context, config):
        return False
    if _number_counted(group, config) < _min_k(group, config):
        return False
    members = [evaluate_member(member, context.criteria) for member in _graded(group, config)]
    traces = [verdict.trace for member in members for verdict in member.trained]
    ages = (context.criteria.clock.age_of(trace, config.staleness.basis) for trace in traces)
    return any(map(config.staleness.is_last_chance, ages))


def _is_young(group: RolloutGroup, context: CutContext, config: BatcherConfig) -> bool:
    """Cheap, and true of most groups: by no basis is a trace older than its oldest token."""
    limit, oldest = config.staleness.enforced, group.oldest_version
    return limit is None or (oldest is not None and context.criteria.clock.age(oldest) < limit)


@dataclass(frozen=True)
class _Evaluation:
    """The verdicts on a group's members, and what they depend on."""

    group: RolloutGroup
    criteria: EligibilityCriteria
    scoring: Scoring | None
    members: tuple[MemberVerdict, ...]


class EvaluationCache:
    """The newest evaluation of each group: a cut evaluates again most of what the one before has evaluated.

    May be emptied at any time: an evaluation depends only on group, criteria and scoring.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _Evaluation] = {}
        self._failed = 0
        """Groups that the scorer has failed at since the last one that it scored."""

    def evaluate(
        self, group: RolloutGroup, state: GroupState, criteria: EligibilityCriteria, config: BatcherConfig
    ) -> EvaluatedGroup:
        """``group`` in ``state``, with the verdict on each member.

        Raises ConfigurationError where the group scorer has failed at more than `MOST_FAILED` groups in a row.
        """
        known = self._newest.get(group.group_id)
        if known is None or known.group is not group or (known.criteria, known.scoring) != (criteria, config.scoring):
            graded = _graded(group, config)
            self._count_failures(graded)
            members = tuple(evaluate_member(member, criteria) for member in graded)
            known = self._newest[group.group_id] = _Evaluation(group, criteria, config.scoring, members)
        return EvaluatedGroup(group, state, known.members)

    def _count_failures(self, graded: tuple[Trajectory, ...]) -> None:
        failed = any(member.ungraded_reason == FAILED for member in graded)
        self._failed = self._failed + 1 if failed else 0
        if self._failed > MOST_FAILED:
            raise ConfigurationError(
                f"the group scorer failed at {self._failed} groups in a row: correct it and start again; the log names "
                "each group and error"
            )

    def keep(self, groups: Iterable[RolloutGroup]) -> None:
        """Forgets every group but these."""
        kept = {group.group_id for group in groups}
        self._newest = {group_id: known for group_id, known in self._newest.items() if group_id in kept}


def check_usable(ready: EvaluatedGroup, config: BatcherConfig) -> EvaluatedGroup:
    """``ready`` itself, or failed with the reason."""
    if len(ready.rewards) < config.learning.advantage.min_rollouts:
        return ready.after(GroupEvent.UNUSABLE, GROUP_TOO_SMALL)
    if config.groups.drop_zero_variance and np.ptp(ready.rewards) == 0:
        return ready.after(GroupEvent.UNUSABLE, ZERO_VARIANCE)
    return ready if ready.trains else ready.after(GroupEvent.UNUSABLE)


def _event(group: RolloutGroup, context: CutContext, config: BatcherConfig) -> GroupEvent | None:
    if group.is_full:
        return GroupEvent.FILLED
    if not context.closing and context.now < group.first_ended_at + config.groups.deadline_seconds:
        return None
    enough = _number_counted(group, config) >= _min_k(group, config)
    return GroupEvent.DEADLINE_WITH_ENOUGH if enough else GroupEvent.DEADLINE_WITH_TOO_FEW


def _graded(group: RolloutGroup, config: BatcherConfig) -> tuple[Trajectory, ...]:
    return group.current if config.scoring is None else config.scoring.score(group)


def _number_counted(group: RolloutGroup, config: BatcherConfig) -> int:
    """Members that count. With a group scorer, which runs later, every member is assumed to get a reward."""
    members = group.current if config.scoring is None else [with_reward(member, 0.0) for member in group.current]
    return sum(is_counted(member, config.sample_policy) for member in members)


def _min_k(group: RolloutGroup, config: BatcherConfig) -> int:
    return min(config.groups.min_k, group.size)
