"""Further values per token: any shape, aligned with the tokens from the trajectory to the trainer's tensors."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollmill.codec import JSON, MSGPACK, decode, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import EXTRA, EXTRA_SPANS, Trace, Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import BATCHES, TRAJECTORIES
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.layouts.arrays import PackedArrays, pack, pad
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, Learning, Size
from rollmill_batcher.sizes import record_bytes
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo
from rollmill_batcher.steps.tensors import PackedTrace, encode_batch, extra_forms, pack_tensors

EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
REFERENCE = np.array([-0.5, -1.0, -2.0], np.float32)


def rollout(name: str, **extras: Any) -> Trajectory:
    return sample_trajectory(name, float(name == "a"), size=3, traces=[sample_trace(name, extras=extras)])


def task_of(*members: Trajectory, world_size: int = 1, tokens: int = 64) -> MemoryTask[StateValue]:
    rules = BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("dr_grpo", DrGrpo()),
        groups_per_step=1,
        world_size=world_size,
        micro_batch=Size(tokens, 4096),
    )
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(rules))
    for member in members:
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    return task


def batches(task: MemoryTask[StateValue]) -> list[PackedBatch]:
    return [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]


def packed(batch: PackedBatch) -> PackedArrays:
    return pack(batch, np.ones(len(batch.trace_index), np.bool_))


MEMBERS = (
    rollout("a", experts=EXPERTS, ref=REFERENCE),
    rollout("b", experts=EXPERTS + 100),
    rollout("c", ref=REFERENCE * 2),
)


def rows(found: PackedArrays, name: str) -> dict[int, Any]:
    """By row of the table, the extra of the trace's tokens."""
    bounds = found.cu_seqlens.tolist()
    return {
        row: found.extras[name][start:stop]
        for row, start, stop in zip(found.trace_index.tolist(), bounds[:-1], bounds[1:], strict=True)
        if row >= 0
    }


@pytest.mark.parametrize(("world_size", "tokens"), [(1, 64), (2, 64), (4, 5)])
def test_rows_stay_with_their_tokens_on_any_rank(world_size: int, tokens: int) -> None:
    experts: dict[int, Any] = {}
    reference: dict[int, Any] = {}
    for batch in batches(task_of(*MEMBERS, world_size=world_size, tokens=tokens)):
        assert batch.header.extras == {"experts": "uint8 [T, 2, 2]", "ref": "float32 [T]"}
        experts |= rows(packed(batch), "experts")
        reference |= rows(packed(batch), "ref")
    none, prompt = np.full((5, 2, 2), 255), np.full((2, 2, 2), 255)
    assert [experts[row].tolist() for row in range(3)] == [
        np.concatenate([prompt, EXPERTS]).tolist(),
        np.concatenate([prompt, EXPERTS + 100]).tolist(),
        none.tolist(),
    ]
    assert [reference[row].tolist() for row in range(3)] == [[0, 0, -0.5, -1, -2], [0] * 5, [0, 0, -1, -2, -4]]


def test_rows_of_padding_have_no_value() -> None:
    (batch,) = batches(task_of(*MEMBERS))
    found = pad(packed(batch), "left").extras
    assert found["experts"].shape == (3, 5, 2, 2)
    assert found["experts"].dtype == np.uint8


def test_mini_batches_take_the_rows_along() -> None:
    first, second = batches(task_of(*MEMBERS, tokens=10))
    records = StepRecords((first, second), {0: 2})
    step = Step(records, filter_step(first.header, first.header.policy_version, {}), lambda _: None)
    found: dict[int, Any] = {}
    for part in step.minibatches(2):
        for each in part.arrays:
            found |= rows(each, "ref")
    assert [found[row].tolist() for row in range(3)] == [[0, 0, -0.5, -1, -2], [0] * 5, [0, 0, -1, -2, -4]]


def test_of_two_forms_of_one_name_most_traces_decide() -> None:
    other = rollout("c", experts=EXPERTS.astype(np.int16))
    (batch,) = batches(task_of(*MEMBERS[:2], other))
    assert batch.header.extras["experts"] == "uint8 [T, 2, 2]"
    assert batch.header.extras_left_out == {"experts": 1}
    assert (rows(packed(batch), "experts")[2] == 255).all()


@pytest.mark.parametrize("form", [JSON, MSGPACK])
@pytest.mark.parametrize("values", [EXPERTS, REFERENCE, EXPERTS.astype(np.int16) - 5, REFERENCE.reshape(3, 1)])
def test_a_trajectory_keeps_them_on_the_log(form: str, values: Any) -> None:
    sent = rollout("a", extra=values)
    got: Trajectory = decode(Trajectory, encode(sent, form), (("content-type", form.encode()),))
    found = got.traces[0].extras["extra"]
    assert (found.dtype, found.shape, found.tolist()) == (values.dtype, values.shape, values.tolist())
    assert got == sent
    assert got != rollout("a", extra=values + values.dtype.type(1))


@pytest.mark.parametrize(
    "values",
    [
        EXPERTS[:2],
        EXPERTS.astype(np.float64),
        {"dtype": "int64", "shape": [3], "data": [1, 2, 3]},
        {"dtype": "uint8", "shape": [3, 2], "data": [1, 2, 3]},
        {"dtype": "uint8", "shape": [3], "data": [1, 2, 300]},
        np.array([[np.nan]] * 3, np.float32),
        np.uint8(3),
    ],
    ids=["too few", "dtype", "named dtype", "shape", "range", "nan", "no tokens"],
)
def test_what_is_not_aligned_or_no_number_is_refused(values: Any) -> None:
    with pytest.raises(ValidationError):
        sample_trace("a", extras={"extra": values})


def broken(spans: list[list[int]]) -> bytes:
    header = batches(task_of(*MEMBERS))[0].header
    traces: list[Trace] = [sample_trace("a", (Reply((5, 6, 7)),), extras={"ref": REFERENCE})]
    tensors = pack_tensors([PackedTrace(trace, 0, 0.0, 1.0, 0, 0) for trace in traces], extra_forms(traces))
    return encode_batch(header, {**tensors, EXTRA_SPANS + "ref": np.array(spans, np.int32).reshape(len(spans), -1)})


@pytest.mark.parametrize(
    "spans", [[[3, 3]], [[2, 2]], [[-1, 3]], [[2, 4], [6, -1]], [[3, 2], [2, 1]], [[2], [3]]], ids=str
)
def test_a_reader_refuses_rows_that_belong_nowhere(spans: list[list[int]]) -> None:
    with pytest.raises(PoisonRecordError, match="extra"):
        read_batch(broken(spans))


def test_their_bytes_count() -> None:
    traces = [sample_trace("a", extras={"experts": EXPERTS, "ref": REFERENCE})]
    tensors = pack_tensors([PackedTrace(traces[0], 0, 0.0, 1.0)], extra_forms(traces))
    assert tensors[EXTRA + "experts"].nbytes == 12
    assert sum(array.nbytes for array in tensors.values()) <= record_bytes(traces[0])
    large = rollout("a", experts=np.zeros((3, 40, 40), np.uint8))
    assert [row.session_id for row in batches(task_of(large, *MEMBERS[1:]))[0].header.table] == ["b", "c"]


def test_a_repeat_with_extras_is_a_duplicate_and_other_values_are_a_conflict() -> None:
    task = task_of(MEMBERS[0], MEMBERS[0], rollout("a", experts=EXPERTS + 1, ref=REFERENCE))
    assert task.counts["duplicates"] == 1
    assert [error.reason for _, error in task.dead_letters] == ["conflict"]
