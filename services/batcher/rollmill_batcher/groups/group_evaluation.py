"""Where a group stands at a cut: the events that its members, the rules and the time make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollmill.models import Trajectory
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.eligibility import Gate, MemberVerdict, counts, judge
from rollmill_batcher.groups.group import Group, GroupEvent, GroupState, moved
from rollmill_batcher.groups.group_scoring import Scoring, rewarded

GROUP_EXPIRED = "group_expired"
GROUP_TOO_SMALL = "group_too_small"
ZERO_VARIANCE = "zero_variance"
SUPERSEDED = "superseded"


@dataclass(frozen=True)
class CutContext:
    """What a cut knows beside the group. ``closing``: no more trajectories come, every deadline has passed."""

    now: float
    gate: Gate
    closing: bool = False


@dataclass(frozen=True)
class EvaluatedGroup:
    """A group with its members' verdicts. ``reason``: of traces that have no reason of their own."""

    group: Group
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
    def compares_nothing(self) -> bool:
        """Two rewards or more, and all are equal."""
        return len(self.rewards) > 1 and bool(np.ptp(self.rewards) == 0)

    @property
    def trains(self) -> bool:
        return any(member.trained for member in self.members)

    def after(self, event: GroupEvent, reason: str | None = None) -> EvaluatedGroup:
        return EvaluatedGroup(self.group, moved(self.state, event), self.members, reason)


def state_of(group: Group, moment: CutContext, rules: BatcherConfig) -> GroupState:
    """Open, ready or expired; staleness plays no part in it but where it makes a group close early."""
    event = _event(group, moment, rules)
    return GroupState.OPEN if event is None else moved(GroupState.OPEN, event)


def grows_stale(group: Group, moment: CutContext, rules: BatcherConfig) -> bool:
    """An open group with at least min-k that this cut can still take inside the limit, and the next one not."""
    if not rules.groups.close_before_stale or _is_young(group, moment, rules):
        return False
    if _counted(group, rules) < _min_k(group, rules):
        return False
    traces = [v.trace for member in _graded(group, rules) for v in judge(member, moment.gate).trained]
    ages = (moment.gate.clock.age_of(trace, rules.staleness.basis) for trace in traces)
    return any(map(rules.staleness.is_last_chance, ages))


def _is_young(group: Group, moment: CutContext, rules: BatcherConfig) -> bool:
    """Cheap, and true of most: no trace is older than the oldest token, by whatever basis."""
    limit = rules.staleness.enforced
    return limit is None or (group.oldest is not None and moment.gate.clock.age(group.oldest) < limit)


@dataclass(frozen=True)
class _Evaluation:
    """The verdicts on a group's members, and what they depend on."""

    group: Group
    gate: Gate
    scoring: Scoring | None
    members: tuple[MemberVerdict, ...]


class EvaluationCache:
    """The newest evaluation of each group: a cut evaluates again most of what the one before has evaluated.

    May be emptied at any time: an evaluation depends on nothing else than group, gate and scoring.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _Evaluation] = {}

    def evaluate(self, group: Group, state: GroupState, gate: Gate, rules: BatcherConfig) -> EvaluatedGroup:
        """``group`` in ``state``, with the verdict on each member."""
        known = self._newest.get(group.group_id)
        if known is None or known.group is not group or (known.gate, known.scoring) != (gate, rules.scoring):
            members = tuple(judge(member, gate) for member in _graded(group, rules))
            known = self._newest[group.group_id] = _Evaluation(group, gate, rules.scoring, members)
        return EvaluatedGroup(group, state, known.members)

    def keep(self, groups: Iterable[Group]) -> None:
        """Forget every group but these."""
        kept = {group.group_id for group in groups}
        self._newest = {group_id: known for group_id, known in self._newest.items() if group_id in kept}


def _graded(group: Group, rules: BatcherConfig) -> tuple[Trajectory, ...]:
    return group.current if rules.scoring is None else rules.scoring.of(group)


def usable(ready: EvaluatedGroup, rules: BatcherConfig) -> EvaluatedGroup:
    """``ready`` itself, or failed with the reason."""
    if len(ready.rewards) < rules.learning.advantage.min_rollouts:
        return ready.after(GroupEvent.UNUSABLE, GROUP_TOO_SMALL)
    if rules.groups.drop_zero_variance and np.ptp(ready.rewards) == 0:
        return ready.after(GroupEvent.UNUSABLE, ZERO_VARIANCE)
    return ready if ready.trains else ready.after(GroupEvent.UNUSABLE)


def _event(group: Group, moment: CutContext, rules: BatcherConfig) -> GroupEvent | None:
    if group.is_full:
        return GroupEvent.FILLED
    if not moment.closing and moment.now < group.first_end + rules.groups.deadline_seconds:
        return None
    enough = _counted(group, rules) >= _min_k(group, rules)
    return GroupEvent.DEADLINE_WITH_ENOUGH if enough else GroupEvent.DEADLINE_WITH_TOO_FEW


def _counted(group: Group, rules: BatcherConfig) -> int:
    """Members that count. Those of a group that is yet to be scored are taken to get a reward."""
    members = group.current if rules.scoring is None else [rewarded(member, 0.0) for member in group.current]
    return sum(counts(member, rules.treatments) for member in members)


def _min_k(group: Group, rules: BatcherConfig) -> int:
    return min(rules.groups.min_k, group.size)
