"""Steps that were returned: laid out anew for other ranks, with the same content, once (rule R4)."""

from dataclasses import replace
from typing import Any

import pytest

from chaos.recompute import Recomputing
from rollmill.errors import ConfigurationError
from rollmill.models import Cut, Record, StepAcknowledged, StepsResharded, StepsReturned
from rollmill.runtime.stream import InputRecord
from rollmill.testing.memory_task import MemoryTask, as_bytes
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.topics import ACKS, BATCHES, CUTS, TRAJECTORIES, Topic
from rollmill.trainer.batches.step_assembly import Expectation, StepAssembler
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, Learning, LossWeighting, Size
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue, progress_of
from rollmill_batcher.steps.advantages import DrGrpo

BATCHER_CONFIG = BatcherConfig(
    run="run",
    policy="policy",
    learning=Learning("dr_grpo", DrGrpo()),
    groups_per_step=1,
    steps_ahead=2,
    micro_batch=Size(10, 4096),
    world_size=4,
    max_ranks=4,
)
Task = MemoryTask[StateValue]


def task_of(**changes: Any) -> Task:
    """Two steps are cut, of four rollouts each."""
    task: Task = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, **changes)))
    for name in ("g0", "g1"):
        for n in range(4):
            task.feed(TRAJECTORIES, sample_trajectory(f"{name}-{n}", float(n), group=name, size=4))
    for _ in range(2):
        task.punctuate(200.0)
    return task


def returned(task: Task, world_size: int = 3, request: str = "r1", next_step: int | None = None) -> None:
    event = StepsReturned(
        run="run", request_id=request, world_size=world_size, next_step=next_step, offsets={"0": 7}, at=5.0
    )
    task.feed(ACKS, event)


def acknowledged(task: Task, step: int, *ranks: int, world_size: int = 4, placement: int = 0) -> None:
    for rank in ranks:
        event = StepAcknowledged(
            run="run", rank=rank, world_size=world_size, step=step, batch_id="b", placement=placement, at=1.0
        )
        task.feed(ACKS, event)


def records(task: Task, placement: int) -> list[PackedBatch]:
    found = [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]
    return [batch for batch in found if batch.header.placement == placement]


def answers(task: Task) -> list[StepsResharded]:
    return [emit.value for emit in task.of(ACKS) if isinstance(emit.value, StepsResharded)]


def content(batches: list[PackedBatch], step: int) -> list[Any]:
    """All that a step trains, trace by trace, whatever the rank."""
    return sorted(
        (
            batch.header.batch_id,
            int(row),
            batch.input_ids[a:b].tolist(),
            batch.behavior_log_probs[a:b].tolist(),
            float(advantage),
            float(weight),
            batch.header.denominators.model_dump_json(),
        )
        for batch in batches
        if batch.header.step == step
        for row, a, b, advantage, weight in zip(
            batch.trace_index,
            batch.cu_seqlens[:-1],
            batch.cu_seqlens[1:],
            batch.advantages,
            batch.loss_weights,
            strict=True,
        )
        if row >= 0
    )


def test_what_is_returned_has_the_same_content_on_other_ranks() -> None:
    task = task_of()
    acknowledged(task, 0, 0, 1, 2, 3)
    acknowledged(task, 1, 0, 2)
    returned(task)
    before, after = records(task, 0), records(task, 1)
    assert {(batch.header.step, batch.header.rank) for batch in after} == {(1, 0), (1, 1), (1, 2)}
    assert len({batch.header.micro_batches for batch in after}) == 1
    assert content(after, 1) == content(before, 1)
    (answer,) = answers(task)
    assert (answer.next_step, answer.steps, answer.world_size, answer.offsets) == (1, 1, 3, {"0": 7})
    assert progress_of(task.state).queued_steps == 1
    assert dict(task.restored().items()) == dict(task.state.items())


def test_a_return_is_answered_once_and_holds_for_later_steps() -> None:
    task = task_of()
    returned(task)
    returned(task)
    assert len(answers(task)) == 1
    assert task.counts["steps_placed_anew"] == 2
    acknowledged(task, 0, 0, 1, 2, world_size=3, placement=1)
    for n in range(4):
        task.feed(TRAJECTORIES, sample_trajectory(f"g2-{n}", float(n), group="g2", size=4))
    task.punctuate(300.0)
    assert {batch.header.rank for batch in records(task, 1) if batch.header.step == 2} == {0, 1, 2}
    returned(task, 2, "r2")
    assert {batch.header.world_size for batch in records(task, 2)} == {2}
    assert {batch.header.step for batch in records(task, 2)} == {1, 2}


def test_an_acknowledgement_of_void_records_finishes_nothing() -> None:
    task = task_of()
    returned(task)
    acknowledged(task, 0, 0, 1, 2, 3)
    assert progress_of(task.state).acks.acknowledged == 0
    assert task.counts["acknowledgements_of_void_records"] == 4


def test_acknowledged_steps_can_be_returned_while_their_groups_are_kept() -> None:
    kept, gone = task_of(returnable_steps=1), task_of()
    for task in (kept, gone):
        acknowledged(task, 0, 0, 1, 2, 3)
        returned(task, next_step=0)
    assert answers(kept)[0].next_step == 0
    assert content(records(kept, 1), 0) == content(records(kept, 0), 0)
    assert answers(gone) == []
    assert [error.reason for _, error in gone.dead_letters] == ["step_gone"]


@pytest.mark.parametrize(
    ("world_size", "next_step", "reason"), [(5, None, "unknown_rank"), (3, 1, "unknown_step")], ids=["ranks", "skips"]
)
def test_what_cannot_be_is_refused(world_size: int, next_step: int | None, reason: str) -> None:
    task = task_of()
    returned(task, world_size, next_step=next_step)
    assert [error.reason for _, error in task.dead_letters] == [reason]
    assert records(task, 1) == []


def test_other_settings_make_no_other_step_of_a_returned_one() -> None:
    before = task_of()
    learning = Learning("dr_grpo", DrGrpo(), LossWeighting.ROLLOUT_MEAN)
    after: Task = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, learning=learning)))
    after.state = before.state
    returned(after)
    assert [error.reason for _, error in after.dead_letters] == ["settings_changed"]


def test_the_same_topics_and_cuts_give_the_bytes_of_every_layout() -> None:
    """A return is no cut: the request in ``acks`` decides it. One is met between two cuts, one after the last."""
    task: Task = MemoryTask(BatcherStage(BATCHER_CONFIG))
    waiting: dict[str, list[InputRecord]] = {}

    def put(topic: Topic, record: Record) -> None:
        records = waiting.setdefault(f"{topic.name}/0", [])
        records.append(InputRecord(topic, 0, len(records), b"", as_bytes(topic, record), ()))
        task.feed(topic, record)

    def put_return(world_size: int, name: str) -> None:
        put(ACKS, StepsReturned(run="run", request_id=name, world_size=world_size, offsets={}, at=5.0))

    for name in ("g0", "g1"):
        for n in range(4):
            put(TRAJECTORIES, sample_trajectory(f"{name}-{n}", float(n), group=name, size=4))
        task.punctuate(200.0)
        put_return(3 if name == "g0" else 2, f"r-{name}")
    work = Recomputing(BATCHER_CONFIG, waiting)
    for cut in (emit.value for emit in task.of(CUTS)):
        assert isinstance(cut, Cut)
        work.cut(cut)
    work.rest()
    assert work.differing == []
    written = {(emit.partition, emit.key.encode()): emit.value for emit in task.of(BATCHES)}
    assert {batch.header.world_size for batch in map(read_batch, work.found.values())} == {4, 3, 2}
    assert work.found == written


def test_a_reader_passes_over_void_records_and_stops_at_newer_ones() -> None:
    def offered(placement: int) -> bytes:
        return step_values(0, [[[SampleTrace("a")]]], placement=placement)[0][0]

    assembler = StepAssembler(Expectation("run", "policy", 0, 1, placement=1), 0)
    assert assembler.feed(0, read_batch(offered(0))) is None
    assert assembler.feed(1, read_batch(offered(1))) is not None
    with pytest.raises(ConfigurationError, match="laid out anew for 1 ranks while this trainer ran"):
        assembler.feed(2, read_batch(offered(2)))
