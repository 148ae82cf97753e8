"""Torch's view of a micro-batch. torch is imported when a tensor is made, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rollmill.trainer.layouts.arrays import PackedArrays, Side, pad

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True)
class _Tensors:
    """Moves all tensors of a layout at once."""

    def to(self, place: device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device; the numpy arrays stay on the host.

        ``non_blocking``: from pinned memory (`pin_memory`) to CUDA the copy is asynchronous to the host.
        """
        return self._each(lambda tensor: tensor.to(place, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory. Raises RuntimeError where torch finds no accelerator."""
        return self._each(lambda tensor: tensor.pin_memory())

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        for each in fields(self):
            value = getattr(self, each.name)
            yield from (
                tensor for tensor in (value.values() if isinstance(value, Mapping) else (value,)) if _is_tensor(tensor)
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def summary(self) -> dict[str, str]:
        """Type and shape of every tensor, such as ``int64[224]``, by its name."""
        return {each.name: shown for each in fields(self) if (shown := _shape(getattr(self, each.name)))}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(f'{name} {shown}' for name, shown in self.summary().items())}>"

    def _each(self, action: Callable[[Tensor], Tensor]) -> Self:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(**{name: _changed(value, action) for name, value in values.items()})


def _changed(value: Any, action: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {name: action(each) for name, each in value.items()}
    return action(value) if _is_tensor(value) else value


def _shape(value: Any) -> str:
    """Empty for what is no tensor, and no map of tensors."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{_shape(each)}" for name, each in value.items())
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if _is_tensor(value) else ""


def _is_tensor(value: object) -> bool:
    return hasattr(value, "pin_memory")


@dataclass(frozen=True, repr=False)
class PaddedMicroBatch(_Tensors):
    """Rows [N, S]; see `rollmill.trainer.layouts.arrays.PaddedArrays` for what each holds."""

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
    group_index: Tensor
    session_index: Tensor
    returns: Tensor
    token_rewards: Tensor | None
    extras: Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class MicroBatch(_Tensors):
    """Packed tensors [T]; see `rollmill.trainer.layouts.arrays.PackedArrays` for what each holds.

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
    group_index: Tensor
    session_index: Tensor
    returns: Tensor
    token_rewards: Tensor | None
    extras: Mapping[str, Tensor]
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
    """Holds the numpy arrays, which do not move between devices."""

    packed: PackedArrays


def micro_batch(packed: PackedArrays, *, filler: bool) -> MicroBatch:
    return MicroBatch(**tensors_of(packed), filler=filler, arrays=_Numpy(packed))


def tensors_of(layout: Any) -> dict[str, Any]:
    """Fields of a dataclass of arrays, each array as a tensor; other values as they are."""
    values = {each.name: getattr(layout, each.name) for each in fields(layout)}
    return {name: _as_tensors(value) for name, value in values.items()}


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: tensor(each) for name, each in value.items()}
    return tensor(value) if isinstance(value, np.ndarray) else value


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor on the array's memory where torch takes read-only memory, else on a copy."""
    # A reader of numpy arrays, and the import of the SDK, need no torch.
    import torch  # noqa: PLC0415
    from torch.utils.dlpack import from_dlpack  # noqa: PLC0415

    try:
        return from_dlpack(array)
    except BufferError:  # numpy or torch from before DLPack knew of read-only memory
        return torch.from_numpy(array.copy())
