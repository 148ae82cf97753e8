"""From a tick to a cut: what is proposed, and the effects of what was decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollmill.models import Cut, Disposition, outcome
from rollmill.runtime.stream import OutputRecord, Outputs, StateView
from rollmill.topics import BATCHES, CUTS, OUTCOMES, REFILLS
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group import Group, GroupState
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.progress import Progress
from rollmill_batcher.state import (
    CutStep,
    DoneGroup,
    Held,
    done_delta,
    done_groups,
    done_key,
    group_key,
    group_of,
    groups,
    progress_delta,
    progress_of,
    step_delta,
)
from rollmill_batcher.steps.cut_metrics import ages, counts_of
from rollmill_batcher.steps.cut_planning import CutPlan, Exclusion
from rollmill_batcher.steps.micro_batches import MicroBatch, micro_batches
from rollmill_batcher.steps.refill_requests import refill_requests

STAGE = "batcher"


def proposed(
    state: StateView[Held], positions: Mapping[str, int], now: float, rules: BatcherConfig, *, caught_up: bool
) -> Cut:
    """The cut that would be made now; its results are still empty.

    A flush takes less than a full step: at the end of the stream, or when the group ready first has waited long
    enough. Neither is asked while more input is known to wait.
    """
    progress = progress_of(state)
    flush = caught_up and (progress.end_of_stream or _waited(groups(state), progress, now, rules))
    return Cut(
        run=rules.run,
        policy=rules.policy,
        step=progress.next_step,
        sequence=progress.sequence,
        positions=dict(sorted(positions.items())),
        policy_version=progress.policy_version,
        queued_steps=progress.queued_steps,
        now=max(now, progress.now),
        seed=rules.seed_of(progress.next_step),
        flush=flush,
    )


def effects_of(state: StateView[Held], cut: Cut, decision: CutPlan, rules: BatcherConfig) -> Outputs:
    """Batches, the cut and the outcomes. Closed groups leave the state, those of a step once it is acknowledged; their
    markers stay.
    """
    progress = progress_of(state)
    rules = laid_out(rules, progress)
    recorded = cut.replace(
        batch_id=rules.batch_id(cut.step, cut.sequence) if decision.step else None,
        groups=tuple(group.group.group_id for group in decision.step),
        excluded=decision.tokens_excluded,
    )
    batches = micro_batches(decision.step, recorded, progress.clock, rules) if decision.step else ()
    wanted = refill_requests(decision.closed, cut, rules.learning.advantage.min_rollouts)
    refills = [OutputRecord(REFILLS, word.group_id, word, partition=0) for word in wanted]
    outcomes = [exclusion_emit(exclusion, cut.now) for exclusion in decision.exclusions]
    deltas = [done_delta(_marker(group, cut)) for group in decision.closed]
    deltas += [step_delta(CutStep(cut=recorded, forks=progress.forks, content=batches[0].content))] if batches else []
    left = [group.group.group_id for group in decision.closed if group.state is not GroupState.CUT]
    past = [done.group_id for done in done_groups(state) if _is_past(done, cut, rules)]
    forgotten = [done_key(group_id) for group_id in past if group_of(state, group_id) is None]
    return Outputs(
        records=(
            OutputRecord(CUTS, _step_key(cut.step), recorded, partition=0),
            *refills,
            *outcomes,
            *step_emits(cut.step, batches),
        ),
        updates=(*deltas, progress_delta(_advanced(progress, recorded))),
        deletes=(*map(group_key, left), *forgotten),
        counts=counts_of(decision, batches),
        observed={"age_at_cut_seconds": ages(decision.step_members, cut.now)},
    )


def exclusion_emit(exclusion: Exclusion, at: float) -> OutputRecord:
    word = outcome(
        Disposition.EXCLUDED,
        stage=STAGE,
        session_id=exclusion.session_id,
        attempt=exclusion.attempt,
        units=exclusion.units,
        reason=exclusion.reason,
        at=at,
    )
    return OutputRecord(OUTCOMES, exclusion.session_id, word)


def _waited(waiting: Iterable[Group], progress: Progress, now: float, rules: BatcherConfig) -> bool:
    """The flush interval has passed since the last step and since the first group was ready.

    That is when a full group had its last member, and when any other met its deadline.
    """
    if rules.flush_seconds is None:
        return False
    ready = [g.last_end if g.is_full else g.first_end + rules.groups.deadline_seconds for g in waiting]
    return bool(ready) and max(min(ready), progress.last_step_at) + rules.flush_seconds <= now


def _advanced(progress: Progress, cut: Cut) -> Progress:
    made = cut.batch_id is not None
    return progress.replace(
        run=cut.run,
        next_step=cut.step + made,
        sequence=cut.sequence + 1,
        now=cut.now,
        last_step_at=cut.now if made else progress.last_step_at,
    )


def _marker(group: EvaluatedGroup, cut: Cut) -> DoneGroup:
    return DoneGroup(
        group_id=group.group.group_id,
        state=group.state,
        sequence=cut.sequence,
        at=cut.now,
        sessions=group.group.sessions,
    )


def _is_past(done: DoneGroup, cut: Cut, rules: BatcherConfig) -> bool:
    return done.at + rules.groups.late_window_seconds < cut.now


def step_emits(step: int, batches: Iterable[MicroBatch]) -> list[OutputRecord]:
    return [
        OutputRecord(BATCHES, f"{_step_key(step)}/{batch.number:06d}", batch.payload, partition=batch.rank)
        for batch in batches
    ]


def laid_out(rules: BatcherConfig, progress: Progress) -> BatcherConfig:
    """For the ranks that there are since the last return."""
    return replace(rules, world_size=progress.world_size or rules.world_size, placement=progress.placement)


def _step_key(step: int) -> str:
    return f"{step:012d}"
