import numpy as np
import orjson
import pytest
import torch
from safetensors.numpy import load, save

from rollmill.errors import PoisonRecordError
from rollmill.models import PolicyVersion
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.trainer.layouts.arrays import PackedArrays, pack, pad
from rollmill.trainer.layouts.micro_batch import micro_batch
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch

SHORT = SampleTrace("a", prompt=(7,), reply=(8, 9), log_probs=(-0.5, -1.5), version=PolicyVersion(0, 3), advantage=2.0)
LONG = SampleTrace(
    "b", prompt=(4, 5), reply=(6, 7, 8), log_probs=(-1.0, -2.0, -3.0), version=PolicyVersion(1, 4), weight=0.5
)


def wire(*traces: SampleTrace) -> PackedBatch:
    return read_batch(step_values(0, [[traces]])[0][0])


def packed(*cleared: int) -> PackedArrays:
    return pack(wire(SHORT, LONG), np.array([index not in cleared for index in range(2)]))


def test_packed_arrays_are_at_token() -> None:
    arrays = packed()
    assert arrays.input_ids.tolist() == [7, 8, 9, 4, 5, 6, 7, 8]
    assert arrays.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert arrays.cu_seqlens.tolist() == [0, 3, 8]
    assert arrays.max_seqlen == 5
    assert arrays.loss_mask.tolist() == [False, True, True, False, False, True, True, True]
    assert arrays.behavior_log_probs.tolist() == [0, -0.5, -1.5, 0, 0, -1, -2, -3]
    assert arrays.advantages.tolist() == [2, 2, 2, 1, 1, 1, 1, 1]
    assert arrays.loss_weight.tolist() == [0, 1, 1, 0, 0, 0.5, 0.5, 0.5]
    assert arrays.versions.tolist() == [[-1, -1], [0, 3], [0, 3], [-1, -1], [-1, -1], [1, 4], [1, 4], [1, 4]]
    assert arrays.turn_ids.tolist() == [-1, 0, 0, -1, -1, 0, 0, 0]
    assert arrays.temperatures.tolist() == [1] * 8
    assert arrays.rewards.tolist() == [1, 1]
    assert arrays.token_rewards is None


def test_packed_arrays_have_the_dtypes_that_kernels_want() -> None:
    arrays = packed()
    assert {arrays.input_ids.dtype.name, arrays.position_ids.dtype.name} == {"int64"}
    assert {arrays.cu_seqlens.dtype.name, arrays.versions.dtype.name, arrays.turn_ids.dtype.name} == {"int32"}
    assert {arrays.loss_weight.dtype.name, arrays.advantages.dtype.name, arrays.rewards.dtype.name} == {"float32"}


def test_a_cleared_trace_keeps_its_tokens_and_loses_mask_and_weight() -> None:
    arrays = packed(0)
    assert arrays.input_ids.tolist() == [7, 8, 9, 4, 5, 6, 7, 8]
    assert arrays.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert arrays.loss_weight.tolist() == [0, 0, 0, 0, 0, 0.5, 0.5, 0.5]


def test_right_padding_puts_each_trace_at_the_start_of_its_row() -> None:
    rows = pad(packed(), "right", pad_token_id=99)
    assert rows.input_ids.tolist() == [[7, 8, 9, 99, 99], [4, 5, 6, 7, 8]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert rows.loss_mask.astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert rows.behavior_log_probs.tolist() == [[0, -0.5, -1.5, 0, 0], [0, 0, -1, -2, -3]]
    assert rows.loss_weight.tolist() == [[0, 1, 1, 0, 0], [0, 0, 0.5, 0.5, 0.5]]
    assert rows.versions[0].tolist() == [[-1, -1], [0, 3], [0, 3], [-1, -1], [-1, -1]]
    assert rows.turn_ids.tolist() == [[-1, 0, 0, -1, -1], [-1, -1, 0, 0, 0]]
    assert rows.lengths.tolist() == [3, 5]


def test_left_padding_puts_each_trace_at_the_end_of_its_row() -> None:
    rows = pad(packed(), "left")
    assert rows.input_ids.tolist() == [[0, 0, 7, 8, 9], [4, 5, 6, 7, 8]]
    assert rows.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert rows.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows.advantages.tolist() == [[0, 0, 2, 2, 2], [1, 1, 1, 1, 1]]


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ValueError, match="'left' or 'right'"):
        pad(packed(), "middle")  # type: ignore[arg-type]  # what an untyped caller may pass


def test_what_needs_no_widening_shares_memory_with_the_message() -> None:
    batch = wire(SHORT, LONG)
    tensors = micro_batch(pack(batch, np.array([True, True])), filler=False)
    assert tensors.behavior_log_probs.data_ptr() == batch.behavior_log_probs.ctypes.data
    assert tensors.loss_mask.data_ptr() == batch.loss_mask.ctypes.data
    assert tensors.cu_seqlens.data_ptr() == batch.cu_seqlens.ctypes.data
    assert not batch.behavior_log_probs.flags.owndata


def test_tensors_say_the_same_as_arrays() -> None:
    tensors = micro_batch(packed(1), filler=False)
    assert tensors.input_ids.dtype == torch.int64
    assert tensors.loss_mask.dtype == torch.bool
    assert tensors.cu_seqlens.dtype == torch.int32
    assert tensors.max_seqlen == 5
    for name in ("input_ids", "position_ids", "loss_mask", "loss_weight", "versions", "turn_ids", "rewards"):
        assert getattr(tensors, name).tolist() == getattr(tensors.numpy(), name).tolist()


def test_padded_tensors_are_the_padded_arrays() -> None:
    rows = micro_batch(packed(), filler=False).padded(side="left", pad_token_id=1)
    assert rows.input_ids.tolist() == [[1, 1, 7, 8, 9], [4, 5, 6, 7, 8]]
    assert rows.loss_mask.dtype == torch.bool
    assert rows.versions.shape == (2, 5, 2)


def test_tensors_move_between_devices_as_one() -> None:
    moved = micro_batch(packed(), filler=False).to("meta")
    assert {moved.input_ids.device.type, moved.loss_weight.device.type, moved.rewards.device.type} == {"meta"}
    assert moved.max_seqlen == 5
    assert moved.padded().input_ids.device.type == "meta"


def test_token_rewards_pass_through_where_they_are() -> None:
    value = step_values(0, [[[SHORT]]])[0][0]
    rewarded = save({**load(value), "token_rewards": np.array([0, 0, 1], np.float32)}, metadata_of(value))
    arrays = pack(read_batch(rewarded), np.array([True]))
    assert arrays.token_rewards is not None
    assert arrays.token_rewards.tolist() == [0, 0, 1]
    assert micro_batch(arrays, filler=False).padded().token_rewards is not None


def metadata_of(value: bytes) -> dict[str, str]:
    size = int.from_bytes(value[:8], "little")
    found: dict[str, str] = orjson.loads(value[8 : 8 + size])["__metadata__"]
    return found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"loss_mask": np.zeros(2, np.uint8)}, "loss_mask has shape"),
        ({"input_ids": np.zeros(3, np.float32)}, "input_ids has dtype F32"),
        ({"loss_mask": np.array([0, 1, 2], np.uint8)}, "loss_mask is neither 0 nor 1"),
        ({"cu_seqlens": np.array([0, 2], np.int32)}, "point outside"),
        ({"trace_index": np.array([5], np.int32)}, "point outside"),
        ({"versions": np.array([[0, 0, 2]], np.int32)}, "point outside"),
        ({"versions": np.array([[0, 0, 5], [0, 0, -2]], np.int32)}, "point outside"),
        ({"turn_ids": np.array([[0, -1], [0, 4]], np.int32)}, "point outside"),
        ({"temperatures": np.ones(3, np.float32)}, "temperatures has shape"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: dict[str, np.ndarray], complaint: str) -> None:
    value = step_values(0, [[[SHORT]]])[0][0]
    with pytest.raises(PoisonRecordError, match=complaint):
        read_batch(save({**load(value), **change}, metadata_of(value)))


@pytest.mark.parametrize("value", [b"", b"\x04\0\0\0\0\0\0\0null", b"\xff" * 40])
def test_what_is_no_safetensors_is_refused(value: bytes) -> None:
    with pytest.raises(PoisonRecordError, match="malformed"):
        read_batch(value)
