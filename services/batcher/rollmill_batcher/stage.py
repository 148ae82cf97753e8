"""The batcher's stage: intake of trajectories, policies and acknowledgements; a cut at a tick (rules B1 to B4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollmill.errors import ConfigurationError, PoisonRecordError
from rollmill.models import (
    EndOfStream,
    PolicyAnnouncement,
    Purpose,
    Rewound,
    StepAcknowledged,
    StepsResharded,
    StepsReturned,
    TrainerEvent,
    Trajectory,
)
from rollmill.runtime.stream import (
    NOTHING,
    InputRecord,
    Outputs,
    Processor,
    StateUpdate,
    StateView,
    TaskContext,
    TaskLocal,
)
from rollmill.topics import ACKS, POLICIES, STATE_BATCHER, TRAJECTORIES
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group import Group, revision_of
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup, EvaluationCache
from rollmill_batcher.progress import Progress
from rollmill_batcher.state import (
    DoneGroup,
    Held,
    done_delta,
    done_of,
    folded,
    group_of,
    groups,
    member_delta,
    progress_delta,
    progress_of,
    slim,
    step_ends,
    step_members,
)
from rollmill_batcher.steps.cut import STAGE, effects_of, exclusion_emit, proposed
from rollmill_batcher.steps.cut_metrics import ages
from rollmill_batcher.steps.cut_planning import decide, excluded
from rollmill_batcher.steps.resharding import placed_anew
from rollmill_batcher.steps.reward_variance_monitor import RewardVarianceMonitor

TRAINER_EVENTS = StepAcknowledged | Rewound | EndOfStream | StepsReturned | StepsResharded
OTHER_POLICY = "other_policy"
LATE_FOR_GROUP = "late_for_group"


class BatcherLocal(TaskLocal):
    """The task's memory of its process: whether it has caught up, what it has evaluated, how rewards differed."""

    def __init__(self) -> None:
        self.has_caught_up = False
        """Since this task started. Until then time stands still: members may wait in the backlog, and no
        deadline passes before they are read. Only delays cuts; each cut says what time it went by."""
        self.evaluations = EvaluationCache()
        self._rewards = RewardVarianceMonitor()
        self._closed: tuple[EvaluatedGroup, ...] = ()
        """By a cut that is yet to be committed."""

    def cut(self, closed: tuple[EvaluatedGroup, ...], left: Iterable[Group]) -> None:
        """A cut closed some groups and ``left`` others waiting."""
        self.evaluations.keep(left)
        self._closed += closed

    def committed(self, state: StateView[Held]) -> None:  # noqa: ARG002  # only that it was
        self._rewards.saw(self._closed)
        self._closed = ()

    def rolled_back(self, state: StateView[Held]) -> None:  # noqa: ARG002  # only that it was
        self._closed = ()


class BatcherStage(Processor[Held, BatcherLocal]):
    """One task over all partitions (rule B1). Intake decides nothing that depends on the order of partitions."""

    name = STAGE
    inputs = (TRAJECTORIES, POLICIES, ACKS)
    state_topic = STATE_BATCHER

    def __init__(self, rules: BatcherConfig) -> None:
        self._rules = rules

    def task_local(self) -> BatcherLocal:
        return BatcherLocal()

    def process(self, state: StateView[Held], record: InputRecord, local: BatcherLocal) -> Outputs:
        _check_run(progress_of(state), self._rules.run)
        value = record.read()
        if isinstance(value, Trajectory):
            return self._take(state, value)
        if isinstance(value, PolicyAnnouncement):
            return self._announced(progress_of(state), value)
        assert isinstance(value, TRAINER_EVENTS)  # noqa: S101  # the three inputs have no other models
        return self._heard(state, value, local)

    def apply(self, key: str, value: Held | None, payload: bytes, _local: BatcherLocal) -> Held:
        return folded(key, value, payload)

    def punctuate(self, state: StateView[Held], context: TaskContext, local: BatcherLocal) -> Outputs:
        """Cut, where a cut changes something."""
        _check_run(progress_of(state), self._rules.run)
        local.has_caught_up = local.has_caught_up or context.caught_up
        now = context.now if local.has_caught_up else 0.0
        cut = proposed(state, context.positions, now, self._rules, caught_up=context.caught_up)
        decision = decide(groups(state), progress_of(state), cut, self._rules, local.evaluations)
        if not decision:
            return NOTHING
        closed = {group.group.group_id for group in decision.closed}
        local.cut(decision.closed, (group for group in groups(state) if group.group_id not in closed))
        return effects_of(state, cut, decision, self._rules)

    def _take(self, state: StateView[Held], trajectory: Trajectory) -> Outputs:
        if trajectory.spec.policy != self._rules.policy:
            return _refused(trajectory, OTHER_POLICY)
        if trajectory.spec.purpose is Purpose.EVAL:
            return _evaluated(trajectory)
        if trajectory.spec.purpose is not Purpose.TRAIN:
            return _refused(trajectory, trajectory.spec.purpose.value)
        done = done_of(state, trajectory.group_id)
        return _late(trajectory, done) if done is not None else self._joined(state, trajectory)

    def _joined(self, state: StateView[Held], trajectory: Trajectory) -> Outputs:
        """Into its group. Raises PoisonRecordError where the same revision said something else before."""
        group = group_of(state, trajectory.group_id)
        held = group.holding(trajectory.session_id, trajectory.attempt) if group else None
        if held is not None and revision_of(trajectory) <= revision_of(held):
            return _said_before(trajectory, held)
        delta = member_delta(trajectory, outputs=self._rules.scoring is not None)
        return Outputs(updates=(delta,), counts={"trajectories" if held is None else "revisions": 1})

    def _announced(self, progress: Progress, announcement: PolicyAnnouncement) -> Outputs:
        if (announcement.run, announcement.policy) != (self._rules.run, self._rules.policy):
            return Outputs(counts={"announcements_of_others": 1})
        return _moved(progress, progress.announced(announcement), "announcements")

    def _heard(self, state: StateView[Held], event: TrainerEvent, local: BatcherLocal) -> Outputs:
        if event.run != self._rules.run:
            return Outputs(counts={"trainer_events_of_others": 1})
        if isinstance(event, StepsReturned):
            return placed_anew(state, event, self._rules, local.evaluations)
        progress = progress_of(state)
        if isinstance(event, StepsResharded):
            return NOTHING  # its own word
        if isinstance(event, StepAcknowledged) and event.placement < progress.placement:
            return Outputs(counts={"acknowledgements_of_void_records": 1})
        _check(progress, event)
        return self._released(state, progress, progress.heard(event), event)

    def _released(
        self, state: StateView[Held], before: Progress, after: Progress, event: StepAcknowledged | Rewound | EndOfStream
    ) -> Outputs:
        """The groups of steps that are done leave the state."""
        kept_from = max(after.kept_from, after.acks.acknowledged - self._rules.returnable_steps)
        moved = _moved(before, after.replace(kept_from=kept_from), event.type)
        done = range(before.acks.acknowledged, after.acks.acknowledged)
        observed = {"age_at_hand_over_seconds": ages(step_members(state, done), event.at)} if done else {}
        return replace(moved, deletes=step_ends(state, range(after.kept_from, kept_from)), observed=observed)

    def gauges(self, state: StateView[Held], _local: BatcherLocal) -> Mapping[str, float]:
        return {"groups_open": sum(1 for _ in groups(state)), "steps_queued": progress_of(state).queued_steps}


def _refused(trajectory: Trajectory, reason: str, deltas: tuple[StateUpdate, ...] = ()) -> Outputs:
    """Never batched, and said so at once. A repeat says the same again, with the same id."""
    exclusion = excluded(trajectory, reason)
    emits = (exclusion_emit(exclusion, trajectory.closed_at),) if exclusion.units else ()
    return Outputs(emits, deltas, counts={"trajectories": 1, f"excluded_{reason}": exclusion.tokens, reason: 1})


def _evaluated(trajectory: Trajectory) -> Outputs:
    """Graded and never batched (rule A7); `rollmill evals` reports it from the topic."""
    effects = _refused(trajectory, trajectory.spec.purpose.value)
    grade = "evals_ungraded" if trajectory.outcome_reward is None else "evals_graded"
    return replace(effects, counts={**effects.counts, grade: 1})


def _late(trajectory: Trajectory, done: DoneGroup) -> Outputs:
    """Its group is closed: a repeat or a revision of a member, or a member that came too late."""
    if done.knows(trajectory):
        return Outputs(counts={"revisions_after_cut" if revision_of(trajectory) else "duplicates": 1})
    return _refused(trajectory, LATE_FOR_GROUP, (done_delta(done.with_late(trajectory)),))


def _said_before(trajectory: Trajectory, held: Trajectory) -> Outputs:
    if revision_of(trajectory) == revision_of(held) and slim(trajectory) != slim(held):
        raise PoisonRecordError(
            "conflict",
            f"revision {revision_of(held)} of {held.session_id}:{held.attempt} is known with other content",
            units_held=True,
        )
    return Outputs(counts={"duplicates": 1})


def _moved(before: Progress, after: Progress, name: str) -> Outputs:
    deltas = () if after == before else (progress_delta(after),)
    return Outputs(updates=deltas, counts={name: 1})


def _check_run(progress: Progress, run: str) -> None:
    """Raises ConfigurationError where the prefix has steps of another run, before anything of that run is taken."""
    if progress.run not in {"", run}:
        raise ConfigurationError(
            f"this prefix holds run {progress.run!r} up to step {progress.next_step}, and ROLLMILL_RUN is {run!r}: "
            "give the new run a prefix of its own (ROLLMILL_PREFIX), or go on with the old one under its name"
        )


def _check(progress: Progress, event: StepAcknowledged | Rewound | EndOfStream) -> None:
    """Raises PoisonRecordError for a word about steps or ranks that do not exist."""
    if isinstance(event, EndOfStream):
        return
    if isinstance(event, Rewound):
        if event.next_step > progress.next_step:
            raise PoisonRecordError("unknown_step", f"{event.next_step}: only {progress.next_step} steps are cut")
        return
    if event.step >= progress.next_step:
        raise PoisonRecordError("unknown_step", f"{event.step}: only {progress.next_step} steps are cut")
    if event.rank >= event.world_size:
        raise PoisonRecordError("unknown_rank", f"{event.rank} of a world size of {event.world_size}")
