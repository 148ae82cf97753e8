"""Returned steps are written again for another number of ranks (rule R4).

Nothing is decided again: the step's own cut gives the same traces, weights, advantages and batch id. Only micro-batches
and ranks differ, so the ledger and a trainer's lineage see one step.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.errors import PoisonRecordError
from rollmill.models import StepsResharded, StepsReturned
from rollmill.runtime.stream import OutputRecord, Outputs, StateView
from rollmill.topics import ACKS
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group import GroupState
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup, EvaluationCache
from rollmill_batcher.groups.staleness import PolicyClock
from rollmill_batcher.progress import RunProgress
from rollmill_batcher.state import CutStep, StateValue, find_group, find_step, progress_of, progress_update
from rollmill_batcher.steps.cut import batch_records, resharded_config
from rollmill_batcher.steps.micro_batches import MicroBatch, build_micro_batches


def reshard(
    state: StateView[StateValue], event: StepsReturned, config: BatcherConfig, evaluations: EvaluationCache
) -> Outputs:
    """New records of the returned steps, and the answer. A repeated request changes nothing.

    Raises PoisonRecordError where steps or ranks do not exist, the groups of a step are gone, or the settings have
    changed so that the step would be another one.
    """
    progress = progress_of(state)
    if event.request_id == progress.answered:
        return Outputs(counts={"duplicates": 1})
    first = _first_step(progress, event, config)
    after = progress.resharded(event, first)
    steps = [_kept_step(state, number) for number in range(first, progress.next_step)]
    repacked = [(step, _repacked(state, step, resharded_config(config, after), evaluations)) for step in steps]
    answer = StepsResharded(
        run=event.run,
        request_id=event.request_id,
        placement=after.placement,
        world_size=event.world_size,
        next_step=first,
        steps=len(steps),
        offsets=event.offsets,
        at=event.at,
    )
    batches = (record for step, made in repacked for record in batch_records(step.cut.step, made))
    return Outputs(
        records=(*batches, OutputRecord(ACKS, event.request_id, answer, partition=0)),
        updates=(progress_update(after),),
        counts={"returns": 1, "steps_placed_anew": len(steps)},
    )


def _first_step(progress: RunProgress, event: StepsReturned, config: BatcherConfig) -> int:
    acknowledged = progress.acks.acknowledged
    first = acknowledged if event.next_step is None else event.next_step
    if event.world_size > config.max_ranks:
        raise PoisonRecordError("unknown_rank", f"{event.world_size} ranks: batches has {config.max_ranks} partitions")
    if first > acknowledged:
        raise PoisonRecordError("unknown_step", f"{first}: step {acknowledged} is not acknowledged by every rank")
    if first < min(progress.kept_from, progress.next_step):
        raise PoisonRecordError(
            "step_gone", f"{first}: the groups of steps below {progress.kept_from} are gone (returnable_steps)"
        )
    return first


def _kept_step(state: StateView[StateValue], number: int) -> CutStep:
    step = find_step(state, number)
    if step is None:
        raise PoisonRecordError("step_gone", f"{number}: it was cut before steps were kept")
    return step


def _repacked(
    state: StateView[StateValue], step: CutStep, config: BatcherConfig, evaluations: EvaluationCache
) -> tuple[MicroBatch, ...]:
    clock = PolicyClock(step.cut.policy_version, step.cut.queued_steps, step.forks)
    batches = build_micro_batches(tuple(_groups(state, step, clock, config, evaluations)), step.cut, clock, config)
    if batches[0].content != step.content:
        raise PoisonRecordError(
            "settings_changed", f"step {step.cut.step} would be another one: return it with the settings of its cut"
        )
    return batches


def _groups(
    state: StateView[StateValue], step: CutStep, clock: PolicyClock, config: BatcherConfig, evaluations: EvaluationCache
) -> Iterable[EvaluatedGroup]:
    criteria = config.criteria(clock)
    for group_id in step.cut.groups:
        group = find_group(state, group_id)
        if group is None:
            raise PoisonRecordError("step_gone", f"{step.cut.step}: its group {group_id} is gone")
        yield evaluations.evaluate(group, GroupState.CUT, criteria, config)
