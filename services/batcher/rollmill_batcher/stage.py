"""The batcher's stage: intake of trajectories, policies and acknowledgements, and cuts in between (rules B1 to B4)."""

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
from rollmill.models.versions import skips_epochs
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
from rollmill_batcher.groups.group import RolloutGroup, revision_of
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup, EvaluationCache
from rollmill_batcher.progress import RunProgress
from rollmill_batcher.state import (
    ClosedGroupMarker,
    StateValue,
    apply_update,
    find_group,
    find_marker,
    marker_update,
    member_update,
    progress_of,
    progress_update,
    slim,
    state_keys_of_steps,
    step_members,
    waiting_groups,
)
from rollmill_batcher.steps.cut import STAGE, cut_outputs, exclusion_record, propose_cut
from rollmill_batcher.steps.cut_metrics import rollout_ages
from rollmill_batcher.steps.cut_planning import exclusion_of, plan_cut
from rollmill_batcher.steps.resharding import reshard
from rollmill_batcher.steps.reward_variance_monitor import RewardVarianceMonitor

TRAINER_EVENTS = StepAcknowledged | Rewound | EndOfStream | StepsReturned | StepsResharded
OTHER_POLICY = "other_policy"
LATE_FOR_GROUP = "late_for_group"


class BatcherLocal(TaskLocal):
    """What the task keeps in memory only: evaluations, and the row of equal rewards."""

    def __init__(self) -> None:
        self.evaluations = EvaluationCache()
        self._rewards = RewardVarianceMonitor()
        self._closed: tuple[EvaluatedGroup, ...] = ()
        """By cuts that are not committed yet."""

    def note_cut(self, closed: tuple[EvaluatedGroup, ...], waiting: Iterable[RolloutGroup]) -> None:
        """A cut closed some groups; others are still ``waiting``."""
        self.evaluations.keep(waiting)
        self._closed += closed

    def committed(self, state: StateView[StateValue]) -> None:  # noqa: ARG002  # what matters is that it was
        self._rewards.observe(self._closed)
        self._closed = ()

    def rolled_back(self, state: StateView[StateValue]) -> None:  # noqa: ARG002  # what matters is that it was
        self._closed = ()


class BatcherStage(Processor[StateValue, BatcherLocal]):
    """One task over all partitions (rule B1). Intake decides nothing that depends on the order of partitions."""

    name = STAGE
    inputs = (TRAJECTORIES, POLICIES, ACKS)
    state_topic = STATE_BATCHER

    def __init__(self, config: BatcherConfig) -> None:
        self._config = config

    def task_local(self) -> BatcherLocal:
        return BatcherLocal()

    def process(self, state: StateView[StateValue], record: InputRecord, local: BatcherLocal) -> Outputs:
        _check_run(progress_of(state), self._config.run)
        value = record.read()
        if isinstance(value, Trajectory):
            return self._take_trajectory(state, value)
        if isinstance(value, PolicyAnnouncement):
            return self._take_announcement(progress_of(state), value)
        assert isinstance(value, TRAINER_EVENTS)  # noqa: S101  # the three inputs have no other models
        return self._take_trainer_event(state, value, local)

    def apply(self, key: str, value: StateValue | None, payload: bytes, _local: BatcherLocal) -> StateValue:
        return apply_update(key, value, payload)

    def punctuate(self, state: StateView[StateValue], context: TaskContext, local: BatcherLocal) -> Outputs:
        """Cuts, where a cut changes something.

        Time is that of the last cut while input waits in the log: no deadline passes for a group with members
        that are not read yet. This only delays cuts; each cut records the time that it used.
        """
        _check_run(progress_of(state), self._config.run)
        now = context.now if context.keeps_up else 0.0
        cut = propose_cut(state, context.positions, now, self._config, caught_up=context.caught_up)
        plan = plan_cut(waiting_groups(state), progress_of(state), cut, self._config, local.evaluations)
        if not plan:
            return NOTHING
        closed = {group.group.group_id for group in plan.closed}
        local.note_cut(plan.closed, (group for group in waiting_groups(state) if group.group_id not in closed))
        return cut_outputs(state, cut, plan, self._config)

    def _take_trajectory(self, state: StateView[StateValue], trajectory: Trajectory) -> Outputs:
        if trajectory.spec.policy != self._config.policy:
            return _exclude(trajectory, OTHER_POLICY)
        if trajectory.spec.purpose is Purpose.EVAL:
            return _take_eval(trajectory)
        if trajectory.spec.purpose is not Purpose.TRAIN:
            return _exclude(trajectory, trajectory.spec.purpose.value)
        marker = find_marker(state, trajectory.group_id)
        return _late(trajectory, marker) if marker is not None else self._add_to_group(state, trajectory)

    def _add_to_group(self, state: StateView[StateValue], trajectory: Trajectory) -> Outputs:
        """Raises PoisonRecordError where the same revision came before with other content."""
        group = find_group(state, trajectory.group_id)
        known = group.find_member(trajectory.session_id, trajectory.attempt) if group else None
        if known is not None and revision_of(trajectory) <= revision_of(known):
            return _repeated(trajectory, known)
        update = member_update(trajectory, outputs=self._config.scoring is not None)
        return Outputs(updates=(update,), counts={"trajectories" if known is None else "revisions": 1})

    def _take_announcement(self, progress: RunProgress, announcement: PolicyAnnouncement) -> Outputs:
        if (announcement.run, announcement.policy) != (self._config.run, self._config.policy):
            return Outputs(counts={"announcements_of_others": 1})
        if skips_epochs(announcement.version, progress.announced):
            return Outputs(counts={"announcements_that_skip_epochs": 1})
        return _progress_outputs(progress, progress.with_announcement(announcement), "announcements")

    def _take_trainer_event(self, state: StateView[StateValue], event: TrainerEvent, local: BatcherLocal) -> Outputs:
        if event.run != self._config.run:
            return Outputs(counts={"trainer_events_of_others": 1})
        if isinstance(event, StepsReturned):
            return reshard(state, event, self._config, local.evaluations)
        progress = progress_of(state)
        if isinstance(event, StepsResharded):
            return NOTHING  # the batcher's own answer
        if isinstance(event, StepAcknowledged) and event.placement < progress.placement:
            return Outputs(counts={"acknowledgements_of_void_records": 1})
        _check_event(progress, event)
        return self._release_steps(state, progress, progress.with_event(event), event)

    def _release_steps(
        self,
        state: StateView[StateValue],
        before: RunProgress,
        after: RunProgress,
        event: StepAcknowledged | Rewound | EndOfStream,
    ) -> Outputs:
        """The groups of steps that cannot be returned any more leave the state."""
        kept_from = max(after.kept_from, after.acks.acknowledged - self._config.returnable_steps)
        outputs = _progress_outputs(before, after.replace(kept_from=kept_from), event.type)
        done = range(before.acks.acknowledged, after.acks.acknowledged)
        observed = {"age_at_hand_over_seconds": rollout_ages(step_members(state, done), event.at)} if done else {}
        deletes = state_keys_of_steps(state, range(after.kept_from, kept_from))
        return replace(outputs, deletes=deletes, observed=observed)

    def gauges(self, state: StateView[StateValue], _local: BatcherLocal) -> Mapping[str, float]:
        return {"groups_open": sum(1 for _ in waiting_groups(state)), "steps_queued": progress_of(state).queued_steps}


def _exclude(trajectory: Trajectory, reason: str, updates: tuple[StateUpdate, ...] = ()) -> Outputs:
    """It is never batched, and its disposition is written at once. A repeat writes the same record id again."""
    exclusion = exclusion_of(trajectory, reason)
    records = (exclusion_record(exclusion, trajectory.closed_at),) if exclusion.units else ()
    return Outputs(records, updates, counts={"trajectories": 1, f"excluded_{reason}": exclusion.tokens, reason: 1})


def _take_eval(trajectory: Trajectory) -> Outputs:
    """Graded and never batched (rule A7); `rollmill evals` reports it from the topic."""
    outputs = _exclude(trajectory, trajectory.spec.purpose.value)
    grade = "evals_ungraded" if trajectory.outcome_reward is None else "evals_graded"
    return replace(outputs, counts={**outputs.counts, grade: 1})


def _late(trajectory: Trajectory, marker: ClosedGroupMarker) -> Outputs:
    """Its group is closed: a repeat or a revision of a member, or a member that came too late."""
    if marker.knows(trajectory):
        return Outputs(counts={"revisions_after_cut" if revision_of(trajectory) else "duplicates": 1})
    return _exclude(trajectory, LATE_FOR_GROUP, (marker_update(marker.with_late(trajectory)),))


def _repeated(trajectory: Trajectory, known: Trajectory) -> Outputs:
    if revision_of(trajectory) == revision_of(known) and slim(trajectory) != slim(known):
        raise PoisonRecordError(
            "conflict",
            f"revision {revision_of(known)} of {known.session_id}:{known.attempt} is known with other content",
            units_held=True,
        )
    return Outputs(counts={"duplicates": 1})


def _progress_outputs(before: RunProgress, after: RunProgress, count: str) -> Outputs:
    updates = () if after == before else (progress_update(after),)
    return Outputs(updates=updates, counts={count: 1})


def _check_run(progress: RunProgress, run: str) -> None:
    """Raises ConfigurationError where the prefix has steps of another run, before any record is processed."""
    if progress.run not in {"", run}:
        raise ConfigurationError(
            f"this prefix holds run {progress.run!r} up to step {progress.next_step}, and ROLLMILL_RUN is {run!r}: "
            "give the new run a prefix of its own (ROLLMILL_PREFIX), or go on with the old one under its name"
        )


def _check_event(progress: RunProgress, event: StepAcknowledged | Rewound | EndOfStream) -> None:
    """Raises PoisonRecordError for an event about steps or ranks that do not exist."""
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
