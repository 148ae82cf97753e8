"""One cut: the cut that would be made now, and the outputs of what `cut_planning` decides about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollmill.models import Cut, Disposition, RefillRequest, outcome
from rollmill.runtime.stream import OutputRecord, Outputs, StateView
from rollmill.topics import BATCHES, CUTS, OUTCOMES, REFILLS
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group import GroupState, RolloutGroup
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.progress import RunProgress
from rollmill_batcher.state import (
    ClosedGroupMarker,
    CutStep,
    StateValue,
    closed_group_markers,
    find_group,
    group_key,
    marker_key,
    marker_update,
    progress_of,
    progress_update,
    step_update,
    waiting_groups,
)
from rollmill_batcher.steps.cut_metrics import cut_counts, rollout_ages
from rollmill_batcher.steps.cut_planning import CutPlan, Exclusion
from rollmill_batcher.steps.micro_batches import MicroBatch, build_micro_batches

STAGE = "batcher"
NOTHING_TO_TRAIN = "nothing_to_train"


def propose_cut(
    state: StateView[StateValue], positions: Mapping[str, int], now: float, config: BatcherConfig, *, caught_up: bool
) -> Cut:
    """The cut that would be made now; its results are still empty.

    A flush takes less than a full step: at the end of the stream, or when the group that was ready first has waited
    long enough. It needs ``caught_up``: while input is unread, more groups may become ready.
    """
    progress = progress_of(state)
    flush = caught_up and (progress.end_of_stream or _has_waited(waiting_groups(state), progress, now, config))
    return Cut(
        run=config.run,
        policy=config.policy,
        step=progress.next_step,
        sequence=progress.sequence,
        positions=dict(sorted(positions.items())),
        policy_version=progress.policy_version,
        queued_steps=progress.queued_steps,
        now=max(now, progress.now),
        seed=config.step_seed(progress.next_step),
        flush=flush,
    )


def cut_outputs(state: StateView[StateValue], cut: Cut, plan: CutPlan, config: BatcherConfig) -> Outputs:
    """Batches, the cut, refill requests and token dispositions.

    Closed groups leave the state, those of a step once it is acknowledged; their markers stay.
    """
    progress = progress_of(state)
    config = resharded_config(config, progress)
    recorded = cut.replace(
        batch_id=config.batch_id(cut.step, cut.sequence) if plan.step else None,
        groups=tuple(group.group.group_id for group in plan.step),
        excluded=plan.tokens_excluded,
    )
    batches = build_micro_batches(plan.step, recorded, progress.clock, config) if plan.step else ()
    updates = [marker_update(_marker(group, cut)) for group in plan.closed]
    updates += [step_update(CutStep(cut=recorded, forks=progress.forks, content=batches[0].content))] if batches else []
    without_step = [group.group.group_id for group in plan.closed if group.state is not GroupState.CUT]
    old = [marker.group_id for marker in closed_group_markers(state) if _is_expired(marker, cut, config)]
    expired_markers = [marker_key(group_id) for group_id in old if find_group(state, group_id) is None]
    return Outputs(
        records=(
            OutputRecord(CUTS, _step_key(cut.step), recorded, partition=0),
            *_refill_records(plan.closed, cut, config.learning.advantage.min_rollouts),
            *(exclusion_record(exclusion, cut.now) for exclusion in plan.exclusions),
            *batch_records(cut.step, batches),
        ),
        updates=(*updates, progress_update(_next_progress(progress, recorded))),
        deletes=(*map(group_key, without_step), *expired_markers),
        counts=cut_counts(plan, batches),
        observed={"age_at_cut_seconds": rollout_ages(plan.step_members, cut.now)},
    )


def exclusion_record(exclusion: Exclusion, at: float) -> OutputRecord:
    disposition = outcome(
        Disposition.EXCLUDED,
        stage=STAGE,
        session_id=exclusion.session_id,
        attempt=exclusion.attempt,
        units=exclusion.units,
        reason=exclusion.reason,
        at=at,
    )
    return OutputRecord(OUTCOMES, exclusion.session_id, disposition)


def batch_records(step: int, batches: Iterable[MicroBatch]) -> list[OutputRecord]:
    return [
        OutputRecord(BATCHES, f"{_step_key(step)}/{batch.number:06d}", batch.payload, partition=batch.rank)
        for batch in batches
    ]


def resharded_config(config: BatcherConfig, progress: RunProgress) -> BatcherConfig:
    """With the number of ranks since the last return of steps."""
    return replace(config, world_size=progress.world_size or config.world_size, placement=progress.placement)


def _has_waited(waiting: Iterable[RolloutGroup], progress: RunProgress, now: float, config: BatcherConfig) -> bool:
    """The flush interval has passed since the last step and since the first group was ready.

    A full group was ready when its last member ended, any other at its deadline.
    """
    if config.flush_seconds is None:
        return False
    ready = [g.last_ended_at if g.is_full else g.first_ended_at + config.groups.deadline_seconds for g in waiting]
    return bool(ready) and max(min(ready), progress.last_step_at) + config.flush_seconds <= now


def _next_progress(progress: RunProgress, cut: Cut) -> RunProgress:
    has_step = cut.batch_id is not None
    return progress.replace(
        run=cut.run,
        next_step=cut.step + has_step,
        sequence=cut.sequence + 1,
        now=cut.now,
        last_step_at=cut.now if has_step else progress.last_step_at,
    )


def _marker(group: EvaluatedGroup, cut: Cut) -> ClosedGroupMarker:
    return ClosedGroupMarker(
        group_id=group.group.group_id,
        state=group.state,
        sequence=cut.sequence,
        at=cut.now,
        sessions=group.group.sessions,
    )


def _is_expired(marker: ClosedGroupMarker, cut: Cut, config: BatcherConfig) -> bool:
    return marker.at + config.groups.late_window_seconds < cut.now


def _refill_records(closed: Iterable[EvaluatedGroup], cut: Cut, min_rollouts: int) -> list[OutputRecord]:
    """Asks whatever drives the rollouts for another group, once for each group that expired or failed at ``cut``.

    Not for a group that announced fewer rollouts than the ``min_rollouts`` that are compared: it would always fail.
    """
    lacking = [group for group in closed if group.state is not GroupState.CUT and group.group.size >= min_rollouts]
    requests = [_refill_request(group, cut) for group in lacking]
    return [OutputRecord(REFILLS, request.group_id, request, partition=0) for request in requests]


def _refill_request(group: EvaluatedGroup, cut: Cut) -> RefillRequest:
    spec = group.group.members[0].spec
    return RefillRequest(
        run=cut.run,
        policy=cut.policy,
        group_id=group.group.group_id,
        task_id=spec.task_id,
        dataset=spec.dataset,
        count=group.group.size,
        reason=group.reason or _common_reason(group),
        failures=group.failures,
        sequence=cut.sequence,
        at=cut.now,
    )


def _common_reason(group: EvaluatedGroup) -> str:
    """The reason of all traces, such as ``stale``, where they have one in common."""
    reasons = {trace.reason for member in group.members for trace in member.traces}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    return reason or NOTHING_TO_TRAIN


def _step_key(step: int) -> str:
    return f"{step:012d}"
