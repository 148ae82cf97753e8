"""What a cut decides: which groups close, which tokens are excluded and why, which groups make the step.

`plan_cut` is a pure function of the waiting groups, the run's progress, the cut and the configuration (rule B2); the
cache of evaluations only saves time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollmill.models import Cut, TokenRange, Trajectory
from rollmill_batcher.groups.config import BatcherConfig, StepOrder
from rollmill_batcher.groups.eligibility import STALE, TOO_LARGE, MemberVerdict, TraceVerdict
from rollmill_batcher.groups.group import READY, GroupEvent, GroupState, RolloutGroup, next_state
from rollmill_batcher.groups.group_evaluation import (
    GROUP_EXPIRED,
    SUPERSEDED,
    CutContext,
    EvaluatedGroup,
    EvaluationCache,
    check_usable,
    grows_stale,
    state_of,
)
from rollmill_batcher.groups.staleness import PolicyClock
from rollmill_batcher.progress import RunProgress
from rollmill_batcher.steps.group_selection import Selection, cleanup_window, order_groups, select_groups
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


def plan_cut(
    groups: Iterable[RolloutGroup],
    progress: RunProgress,
    cut: Cut,
    config: BatcherConfig,
    evaluations: EvaluationCache,
) -> CutPlan:
    """What ``cut`` does with the waiting ``groups``, in whatever order they are given.

    Staleness is computed only where a step may be cut: until then it is not known what else will be queued.
    """
    clock = PolicyClock(cut.policy_version, cut.queued_steps, progress.forks)
    context = CutContext(cut.now, config.criteria(clock), closing=progress.end_of_stream and cut.flush)
    waiting = sorted(groups, key=lambda group: (group.opened_at, group.group_id))
    states = {group.group_id: state_of(group, context, config) for group in waiting}
    evaluator = _Evaluator(states, context, config, evaluations)
    expired = tuple(evaluator.expired(group) for group in waiting if states[group.group_id] is GroupState.EXPIRED)
    selection = Selection()
    if cut.queued_steps < config.steps_ahead:
        offered = order_groups(waiting, config.order, clock, cut.seed)
        selection = select_groups(evaluator.ready(offered), config)
        if selection.full and config.order is not StepOrder.FIFO:
            selection = _with_failed(selection, waiting, evaluator, cut.sequence)
    taken = selection.taken if selection.full or cut.flush else ()
    step = tuple(group.after(GroupEvent.TAKEN) for group in taken)
    closed = (*expired, *selection.failed, *step)
    return CutPlan(closed, step, tuple(exclusion for group in closed for exclusion in _exclusions(group)))


def exclusion_of(member: Trajectory, reason: str) -> Exclusion:
    """All trainable tokens of a trajectory, for one reason."""
    return Exclusion(member.session_id, member.attempt, reason, member.manifest.units)


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates groups for one cut; ``states`` are theirs at its time, by id."""

    states: Mapping[str, GroupState]
    context: CutContext
    config: BatcherConfig
    cache: EvaluationCache

    def expired(self, group: RolloutGroup) -> EvaluatedGroup:
        criteria = self.context.criteria.without_staleness()
        members = self.cache.evaluate(group, GroupState.EXPIRED, criteria, self.config).members
        return EvaluatedGroup(group, GroupState.EXPIRED, members, GROUP_EXPIRED)

    def ready(self, waiting: Sequence[RolloutGroup]) -> Iterator[EvaluatedGroup]:
        """Those that are ready, in the given order: usable, or failed. Lazy: a step takes few of many groups."""
        for group in waiting:
            state = self.states[group.group_id]
            if state is GroupState.OPEN and grows_stale(group, self.context, self.config):
                state = next_state(state, GroupEvent.GROWING_STALE)
            if state in READY:
                ready = self.cache.evaluate(group, state, self.context.criteria, self.config)
                evaluated = check_usable(ready, self.config)
                too_large = evaluated.state in READY and table_bytes(evaluated) > self.config.header_bytes
                yield evaluated.after(GroupEvent.UNUSABLE, TOO_LARGE) if too_large else evaluated


def _with_failed(
    selection: Selection, waiting: Sequence[RolloutGroup], evaluator: _Evaluator, sequence: int
) -> Selection:
    """Adds some of the failed groups behind a step that is full. The order ``fifo`` reaches every group without it."""
    seen = {group.group.group_id for group in (*selection.taken, *selection.failed)}
    behind = [group for group in waiting if group.group_id not in seen and evaluator.states[group.group_id] in READY]
    evaluated = evaluator.ready(cleanup_window(behind, sequence))
    failed = tuple(group for group in evaluated if group.state is GroupState.FAILED)
    return replace(selection, failed=(*selection.failed, *failed))


def _exclusions(group: EvaluatedGroup) -> list[Exclusion]:
    """One for each attempt and reason, superseded attempts included."""
    exclusions = [exclusion_of(member, SUPERSEDED) for member in group.group.superseded]
    for verdict in group.members:
        exclusions += _member_exclusions(verdict, group)
    return [exclusion for exclusion in exclusions if exclusion.units]


def _member_exclusions(verdict: MemberVerdict, group: EvaluatedGroup) -> list[Exclusion]:
    by_reason: dict[str, tuple[TokenRange, ...]] = {}
    for trace in verdict.traces:
        for reason, units in _left_out(trace, group):
            by_reason[reason] = (*by_reason.get(reason, ()), *units)
    member = verdict.member
    return [Exclusion(member.session_id, member.attempt, reason, units) for reason, units in by_reason.items()]


def _left_out(trace: TraceVerdict, group: EvaluatedGroup) -> list[tuple[str, tuple[TokenRange, ...]]]:
    """What of a trace does not train, by reason: all of it, or its stale tokens."""
    reason = trace.reason or group.reason
    whole = [] if reason is None else [(reason, trace.units)]
    return [*whole, (STALE, trace.stale)] if trace.stale else whole
