"""The decision of a cut: which groups close, which tokens are excluded and why, which groups make the step.

`decide` is a pure function of the waiting groups, the run's progress, the cut and the rules (rule B2); the cache of
evaluations only saves time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollmill.models import Cut, TokenRange, Trajectory
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.eligibility import STALE, TOO_LARGE, MemberVerdict, TraceVerdict
from rollmill_batcher.groups.group import READY, Group, GroupEvent, GroupState, moved
from rollmill_batcher.groups.group_evaluation import (
    GROUP_EXPIRED,
    SUPERSEDED,
    CutContext,
    EvaluatedGroup,
    EvaluationCache,
    grows_stale,
    state_of,
    usable,
)
from rollmill_batcher.groups.staleness import PolicyClock
from rollmill_batcher.progress import Progress
from rollmill_batcher.steps.group_ordering import StepOrder, ordered
from rollmill_batcher.steps.group_selection import Selection, looked_after, selected
from rollmill_batcher.steps.step_table import table_bytes


@dataclass(frozen=True)
class Exclusion:
    """Tokens of one attempt that are not trained, for one reason."""

    session_id: str
    attempt: int
    reason: str
    units: tuple[TokenRange, ...]

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)


@dataclass(frozen=True)
class CutPlan:
    """``closed``: every group that leaves the state, the step's own included. ``step``: empty for no batch."""

    closed: tuple[EvaluatedGroup, ...] = ()
    step: tuple[EvaluatedGroup, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.closed)

    @property
    def step_members(self) -> Iterator[Trajectory]:
        """The rollouts of the step's groups."""
        return (member for group in self.step for member in group.group.members)

    @property
    def tokens_excluded(self) -> dict[str, int]:
        """By reason, sorted."""
        tokens: dict[str, int] = {}
        for exclusion in self.exclusions:
            tokens[exclusion.reason] = tokens.get(exclusion.reason, 0) + exclusion.tokens
        return dict(sorted(tokens.items()))


def decide(
    groups: Iterable[Group], progress: Progress, cut: Cut, rules: BatcherConfig, evaluations: EvaluationCache
) -> CutPlan:
    """What ``cut`` does with the waiting ``groups``, in whatever order they are given.

    Staleness is judged only where a step may be cut: until then it is not known what else will be queued.
    """
    clock = PolicyClock(cut.policy_version, cut.queued_steps, progress.forks)
    moment = CutContext(cut.now, rules.gate(clock), closing=progress.end_of_stream and cut.flush)
    waiting = sorted(groups, key=lambda group: (group.opened_at, group.group_id))
    states = {group.group_id: state_of(group, moment, rules) for group in waiting}
    examine = _Examination(states, moment, rules, evaluations)
    expired = tuple(examine.expired(group) for group in waiting if states[group.group_id] is GroupState.EXPIRED)
    selection = Selection()
    if cut.queued_steps < rules.steps_ahead:
        offered = ordered(waiting, rules.order, clock, cut.seed)
        selection = selected(examine.ready(offered), rules)
        if selection.full and rules.order is not StepOrder.FIFO:
            selection = _with_failed(selection, waiting, examine, cut.sequence)
    taken = selection.taken if selection.full or cut.flush else ()
    step = tuple(group.after(GroupEvent.TAKEN) for group in taken)
    closed = (*expired, *selection.failed, *step)
    return CutPlan(closed, step, tuple(exclusion for group in closed for exclusion in _exclusions(group)))


def excluded(member: Trajectory, reason: str) -> Exclusion:
    """All trainable tokens of a trajectory, for one reason."""
    return Exclusion(member.session_id, member.attempt, reason, member.manifest.units)


@dataclass(frozen=True)
class _Examination:
    """What one cut finds out about groups, by their ``states`` at its time."""

    states: Mapping[str, GroupState]
    moment: CutContext
    rules: BatcherConfig
    evaluations: EvaluationCache

    def expired(self, group: Group) -> EvaluatedGroup:
        gate = self.moment.gate.without_staleness()
        members = self.evaluations.evaluate(group, GroupState.EXPIRED, gate, self.rules).members
        return EvaluatedGroup(group, GroupState.EXPIRED, members, GROUP_EXPIRED)

    def ready(self, waiting: Sequence[Group]) -> Iterator[EvaluatedGroup]:
        """The groups that are ready, in the order given: as they are, or failed. Lazy: a step looks at few of them."""
        for group in waiting:
            state = self.states[group.group_id]
            if state is GroupState.OPEN and grows_stale(group, self.moment, self.rules):
                state = moved(state, GroupEvent.GROWING_STALE)
            if state in READY:
                found = usable(self.evaluations.evaluate(group, state, self.moment.gate, self.rules), self.rules)
                too_large = found.state in READY and table_bytes(found) > self.rules.header_bytes
                yield found.after(GroupEvent.UNUSABLE, TOO_LARGE) if too_large else found


def _with_failed(selection: Selection, waiting: Sequence[Group], examine: _Examination, sequence: int) -> Selection:
    """And some of the failed ones behind a step that is full. First come, first served reaches every group anyway."""
    seen = {group.group.group_id for group in (*selection.taken, *selection.failed)}
    behind = [group for group in waiting if group.group_id not in seen and examine.states[group.group_id] in READY]
    found = examine.ready(looked_after(behind, sequence))
    failed = tuple(group for group in found if group.state is GroupState.FAILED)
    return replace(selection, failed=(*selection.failed, *failed))


def _exclusions(group: EvaluatedGroup) -> list[Exclusion]:
    """One per attempt and reason; attempts that another one stands for are named, too."""
    found = [excluded(member, SUPERSEDED) for member in group.group.superseded]
    for verdict in group.members:
        found += _member_exclusions(verdict, group)
    return [exclusion for exclusion in found if exclusion.units]


def _member_exclusions(verdict: MemberVerdict, group: EvaluatedGroup) -> list[Exclusion]:
    units: dict[str, tuple[TokenRange, ...]] = {}
    for trace in verdict.traces:
        for reason, own in _left_out(trace, group):
            units[reason] = (*units.get(reason, ()), *own)
    member = verdict.member
    return [Exclusion(member.session_id, member.attempt, reason, those) for reason, those in units.items()]


def _left_out(trace: TraceVerdict, group: EvaluatedGroup) -> list[tuple[str, tuple[TokenRange, ...]]]:
    """What of a trace does not train, by reason: all of it, or its stale tokens."""
    reason = trace.reason or group.reason
    whole = [] if reason is None else [(reason, trace.units)]
    return [*whole, (STALE, trace.stale)] if trace.stale else whole
