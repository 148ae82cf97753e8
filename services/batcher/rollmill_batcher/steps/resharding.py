"""Steps that were returned are laid out anew for another number of ranks (rule R4).

Nothing is decided again: the step's own cut gives the same traces, weights and advantages, and the same batch id. Only
micro-batches and ranks differ, so the ledger and a trainer's lineage see one step.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.errors import PoisonRecordError
from rollmill.models import StepsResharded, StepsReturned
from rollmill.runtime.stream import OutputRecord, Outputs, StateView
from rollmill.topics import ACKS
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.eligibility import Gate
from rollmill_batcher.groups.group import GroupState
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup, EvaluationCache
from rollmill_batcher.groups.staleness import PolicyClock
from rollmill_batcher.progress import Progress
from rollmill_batcher.state import CutStep, Held, group_of, progress_delta, progress_of, step_of
from rollmill_batcher.steps.cut import laid_out, step_emits
from rollmill_batcher.steps.micro_batches import MicroBatch, micro_batches


def placed_anew(
    state: StateView[Held], event: StepsReturned, rules: BatcherConfig, evaluations: EvaluationCache
) -> Outputs:
    """New records of the returned steps and the answer. The same request again is answered once.

    Raises PoisonRecordError where steps or ranks do not exist, a step's groups are gone, or other settings would make
    another step of them.
    """
    progress = progress_of(state)
    if event.request_id == progress.answered:
        return Outputs(counts={"duplicates": 1})
    first = _first(progress, event, rules)
    after = progress.placed(event, first)
    steps = [_held(state, number) for number in range(first, progress.next_step)]
    laid = [(step, _laid_out(state, step, laid_out(rules, after), evaluations)) for step in steps]
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
    records = (emit for step, batches in laid for emit in step_emits(step.cut.step, batches))
    emits = (*records, OutputRecord(ACKS, event.request_id, answer, partition=0))
    return Outputs(emits, (progress_delta(after),), counts={"returns": 1, "steps_placed_anew": len(steps)})


def _first(progress: Progress, event: StepsReturned, rules: BatcherConfig) -> int:
    acknowledged = progress.acks.acknowledged
    first = acknowledged if event.next_step is None else event.next_step
    if event.world_size > rules.most_ranks:
        raise PoisonRecordError("unknown_rank", f"{event.world_size} ranks: batches has {rules.most_ranks} partitions")
    if first > acknowledged:
        raise PoisonRecordError("unknown_step", f"{first}: step {acknowledged} is not acknowledged by every rank")
    if first < min(progress.kept_from, progress.next_step):
        raise PoisonRecordError(
            "step_gone", f"{first}: the groups of steps below {progress.kept_from} are gone (returnable_steps)"
        )
    return first


def _held(state: StateView[Held], number: int) -> CutStep:
    step = step_of(state, number)
    if step is None:
        raise PoisonRecordError("step_gone", f"{number}: it was cut before steps were kept")
    return step


def _laid_out(
    state: StateView[Held], step: CutStep, rules: BatcherConfig, evaluations: EvaluationCache
) -> tuple[MicroBatch, ...]:
    clock = PolicyClock(step.cut.policy_version, step.cut.queued_steps, step.forks)
    batches = micro_batches(tuple(_groups(state, step, rules.gate(clock), rules, evaluations)), step.cut, clock, rules)
    if batches[0].content != step.content:
        raise PoisonRecordError(
            "settings_changed", f"step {step.cut.step} would be another one: return it with the settings of its cut"
        )
    return batches


def _groups(
    state: StateView[Held], step: CutStep, gate: Gate, rules: BatcherConfig, evaluations: EvaluationCache
) -> Iterable[EvaluatedGroup]:
    for group_id in step.cut.groups:
        group = group_of(state, group_id)
        if group is None:
            raise PoisonRecordError("step_gone", f"{step.cut.step}: its group {group_id} is gone")
        yield evaluations.evaluate(group, GroupState.CUT, gate, rules)
