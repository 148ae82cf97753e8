"""Traces selected from packed arrays and joined again. Pure numpy, no loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.models.extras import missing
from rollmill.trainer.layouts.arrays import PackedArrays

TOKEN_COLUMNS = (
    "input_ids",
    "position_ids",
    "loss_mask",
    "behavior_log_probs",
    "advantages",
    "loss_weight",
    "versions",
    "temperatures",
    "turn_ids",
    "returns",
)
TRACE_COLUMNS = ("prompt_lengths", "rewards", "trace_index", "group_index", "session_index")


def select(packed: PackedArrays, chosen: npt.NDArray[np.bool_]) -> PackedArrays:
    """The traces where ``chosen`` [N] is true, in their order."""
    lengths = np.diff(packed.cu_seqlens)
    inside = np.repeat(chosen, lengths)
    tokens: dict[str, Any] = {name: getattr(packed, name)[inside] for name in TOKEN_COLUMNS}
    traces: dict[str, Any] = {name: getattr(packed, name)[chosen] for name in TRACE_COLUMNS}
    return replace(
        packed,
        **tokens,
        **traces,
        **_bounds(lengths[chosen]),
        token_rewards=None if packed.token_rewards is None else packed.token_rewards[inside],
        extras={name: values[inside] for name, values in packed.extras.items()},
    )


def join(parts: Sequence[PackedArrays]) -> PackedArrays:
    """All traces of the parts, one part after the other. A column that a part lacks is zeros there, an extra is
    `missing`.
    """
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in (*TOKEN_COLUMNS, *TRACE_COLUMNS)
    }
    extras = sorted({name for part in parts for name in part.extras})
    rewarded = any(part.token_rewards is not None for part in parts)
    return PackedArrays(
        **columns,
        **_bounds(np.concatenate([np.diff(part.cu_seqlens) for part in parts])),
        token_rewards=_filled([part.token_rewards for part in parts], parts) if rewarded else None,
        extras={name: _joined([part.extras.get(name) for part in parts], parts) for name in extras},
    )


def filler_of(packed: PackedArrays) -> PackedArrays:
    """The first trace with nothing trained in it: a rank without work computes it, to keep step with the others."""
    first = select(packed, np.arange(len(packed.trace_index)) == 0)
    no_index = np.full(1, -1, np.int32)
    return replace(
        first,
        loss_mask=np.zeros_like(first.loss_mask),
        loss_weight=np.zeros_like(first.loss_weight),
        trace_index=no_index,
        group_index=no_index,
        session_index=no_index,
    )


def _joined(values: Sequence[npt.NDArray[Any] | None], parts: Sequence[PackedArrays]) -> npt.NDArray[Any]:
    known = next(value for value in values if value is not None)
    blank = missing(known.dtype)
    filled = [
        np.full((len(part.input_ids), *known.shape[1:]), blank, known.dtype) if value is None else value
        for value, part in zip(values, parts, strict=True)
    ]
    return np.concatenate(filled)


def _filled(values: Sequence[npt.NDArray[np.float32] | None], parts: Sequence[PackedArrays]) -> npt.NDArray[np.float32]:
    filled = [
        np.zeros(len(part.input_ids), np.float32) if value is None else value
        for value, part in zip(values, parts, strict=True)
    ]
    return np.concatenate(filled)


def _bounds(lengths: npt.NDArray[np.int32]) -> dict[str, Any]:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": int(lengths.max(initial=0))}
