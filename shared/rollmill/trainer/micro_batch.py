"""Torch's view of a micro-batch. torch is imported at hand-over and by nothing else in the SDK."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rollmill.trainer.layouts import PackedArrays, Side, pad

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True)
class _Tensors:
    """Moves all tensors of a layout at once."""

    def to(self, place: device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device; the numpy arrays stay where they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(place, non_blocking=non_blocking) if hasattr(value, "to") else value
            for name, value in values.items()
        }
        return type(self)(**moved)


@dataclass(frozen=True)
class PaddedMicroBatch(_Tensors):
    """Rows [N, S]; see `rollmill.trainer.layouts.PaddedArrays` for what each holds."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    loss_weight: Tensor
    versions: Tensor
    temperatures: Tensor
    turn_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    rewards: Tensor
    trace_index: Tensor
    token_rewards: Tensor | None


@dataclass(frozen=True)
class MicroBatch(_Tensors):
    """Packed tensors [T]; see `rollmill.trainer.layouts.PackedArrays` for what each holds.

    What needs no widening shares its memory with the message it came in: do not write into it.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    loss_weight: Tensor
    versions: Tensor
    temperatures: Tensor
    turn_ids: Tensor
    prompt_lengths: Tensor
    rewards: Tensor
    trace_index: Tensor
    token_rewards: Tensor | None
    filler: bool
    """True: nothing in it is trained; it is there so that every rank runs the same number of micro-batches."""
    arrays: _Numpy

    def numpy(self) -> PackedArrays:
        """The same as numpy arrays."""
        return self.arrays.packed

    def padded(self, side: Side = "right", pad_token_id: int = 0) -> PaddedMicroBatch:
        """One row per trace, padded on one side, on the device of this micro-batch."""
        padded = PaddedMicroBatch(**tensors_of(pad(self.arrays.packed, side, pad_token_id)))
        return padded.to(self.input_ids.device)


@dataclass(frozen=True)
class _Numpy:
    """Keeps the arrays out of the way of moves between devices."""

    packed: PackedArrays


def micro_batch(packed: PackedArrays, *, filler: bool) -> MicroBatch:
    return MicroBatch(**tensors_of(packed), filler=filler, arrays=_Numpy(packed))


def tensors_of(layout: Any) -> dict[str, Any]:
    """Fields of a dataclass of arrays, each array as a tensor; other values as they are."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor on the array's memory where torch takes read-only memory, else on a copy."""
    # A reader of numpy arrays, and the import of the SDK, need no torch.
    import torch  # noqa: PLC0415
    from torch.utils.dlpack import from_dlpack  # noqa: PLC0415

    try:
        return from_dlpack(array)
    except BufferError:  # numpy or torch from before DLPack knew of read-only memory
        return torch.from_numpy(array.copy())
