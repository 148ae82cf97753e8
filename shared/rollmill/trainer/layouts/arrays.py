"""From the wire's packed, minimal arrays to what a trainer computes with: widened, packed or padded. Pure numpy.

"At token" everywhere: value *i* belongs to token *i*. Nothing here loops over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollmill.models.extras import missing
from rollmill.trainer.layouts.safetensors_reader import PackedBatch

Side = Literal["left", "right"]


@dataclass(frozen=True)
class PackedArrays:
    """N traces one after the other, T tokens in all. Trace *n* is ``cu_seqlens[n]:cu_seqlens[n + 1]``."""

    input_ids: npt.NDArray[np.int64]
    """[T]"""
    position_ids: npt.NDArray[np.int64]
    """[T], counts from 0 in each trace."""
    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], from 0 to T."""
    max_seqlen: int
    """Tokens of the longest trace."""
    loss_mask: npt.NDArray[np.bool_]
    """[T], true = sampled by the policy and trained in this step."""
    behavior_log_probs: npt.NDArray[np.float32]
    """[T], under the policy that sampled the token; 0.0 at context."""
    advantages: npt.NDArray[np.float32]
    """[T], the trace's advantage at each of its tokens."""
    loss_weight: npt.NDArray[np.float32]
    """[T], weight of the token in the step's loss; 0.0 wherever the mask is false."""
    versions: npt.NDArray[np.int32]
    """[T, 2], epoch and version that sampled the token; (-1, -1) at context."""
    temperatures: npt.NDArray[np.float32]
    """[T], at which the token's turn was sampled; at context and in turns without one, that of the trace's first
    trained turn that has one. 0.0 = no turn has one."""
    turn_ids: npt.NDArray[np.int32]
    """[T], turn that sampled the token; -1 at context."""
    prompt_lengths: npt.NDArray[np.int32]
    """[N]"""
    rewards: npt.NDArray[np.float32]
    """[N]"""
    trace_index: npt.NDArray[np.int32]
    """[N], row of the trace in the header's table; -1 in a filler."""
    group_index: npt.NDArray[np.int32]
    """[N], index of the trace's group in the header's groups; -1 in a filler."""
    session_index: npt.NDArray[np.int32]
    """[N], number of the trace's rollout, counted over the step, the same on every rank; -1 in a filler."""
    returns: npt.NDArray[np.float32]
    """[T], see `returns`."""
    token_rewards: npt.NDArray[np.float32] | None = None
    """[T]; None where no token has a reward of its own."""
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[T, ...] each, by name: what the producer of the trajectories has added, `missing` where it has not."""


@dataclass(frozen=True)
class PaddedArrays:
    """The same traces as rows of [N, S], S = tokens of the longest. Padding has mask false and weight 0.0."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    """[N, S], 1 = a token, 0 = padding."""
    position_ids: npt.NDArray[np.int64]
    """[N, S], counts from 0 at the first token of each row; 0 at padding."""
    loss_mask: npt.NDArray[np.bool_]
    behavior_log_probs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    loss_weight: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    """[N, S, 2]; (-1, -1) at context and padding."""
    temperatures: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int32]
    """[N, S]; -1 at context and padding."""
    lengths: npt.NDArray[np.int32]
    """[N]"""
    prompt_lengths: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]
    trace_index: npt.NDArray[np.int32]
    group_index: npt.NDArray[np.int32]
    session_index: npt.NDArray[np.int32]
    returns: npt.NDArray[np.float32]
    token_rewards: npt.NDArray[np.float32] | None = None
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def pack(batch: PackedBatch, kept: npt.NDArray[np.bool_]) -> PackedArrays:
    """Widened packed arrays. ``kept`` [N]: false clears the trace's mask and weights, its tokens stay as they are.

    What needs no widening is a view of the message's own bytes.
    """
    lengths = np.diff(batch.cu_seqlens)
    loss_mask = batch.loss_mask.view(np.bool_)
    if not kept.all():
        loss_mask = loss_mask & np.repeat(kept, lengths)
    return PackedArrays(
        input_ids=batch.input_ids.astype(np.int64),
        position_ids=_positions(batch.cu_seqlens, lengths),
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=int(lengths.max(initial=0)),
        loss_mask=loss_mask,
        behavior_log_probs=batch.behavior_log_probs,
        advantages=np.repeat(batch.advantages, lengths),
        loss_weight=np.repeat(batch.loss_weights, lengths) * loss_mask,
        versions=np.repeat(batch.versions[:, :2], batch.versions[:, 2], axis=0),
        temperatures=np.repeat(batch.temperatures, batch.turn_ids[:, 1]),
        turn_ids=np.repeat(batch.turn_ids[:, 0], batch.turn_ids[:, 1]),
        prompt_lengths=batch.prompt_lengths,
        rewards=batch.rewards,
        trace_index=batch.trace_index,
        group_index=batch.group_index,
        session_index=batch.session_index,
        returns=returns(batch.later_rewards, batch.token_rewards, batch.cu_seqlens),
        token_rewards=batch.token_rewards,
        extras={name: extra.over(len(batch.input_ids)) for name, extra in batch.extras.items()},
    )


def returns(
    later: npt.NDArray[np.float32], token_rewards: npt.NDArray[np.float32] | None, cu_seqlens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """[T], the sum of the token rewards of the rollout from a token on, its own included; no discount (rule A5).

    Traces of a rollout follow each other in its order. ``later`` [N]: what the rollout gets after the trace, wherever
    its other traces are; where no token of the rollout has a reward of its own, the trace's reward, so that it is the
    return of each of its tokens. ``token_rewards`` [T] or None, ``cu_seqlens`` [N + 1].
    """
    lengths = np.diff(cu_seqlens)
    if token_rewards is None:
        return np.repeat(later, lengths)
    sums = np.concatenate([[0.0], np.cumsum(token_rewards, dtype=np.float64)])
    return np.asarray(np.repeat(sums[cu_seqlens[1:]] + later, lengths) - sums[:-1], dtype=np.float32)


def _positions(cu_seqlens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    positions, longest = np.empty(cu_seqlens[-1], dtype=np.int64), np.arange(lengths.max(initial=0), dtype=np.int64)
    for start, length in zip(cu_seqlens.tolist(), lengths.tolist(), strict=False):
        positions[start : start + length] = longest[:length]
    return positions


def pad(packed: PackedArrays, side: Side = "right", pad_token_id: int = 0) -> PaddedArrays:
    """Rows padded on the right or on the left."""
    lengths = np.diff(packed.cu_seqlens)
    rows = _Rows(packed.cu_seqlens, packed.max_seqlen, side)
    return PaddedArrays(
        input_ids=rows(packed.input_ids, pad_token_id),
        attention_mask=rows(np.ones(len(packed.input_ids), dtype=np.int64)),
        position_ids=rows(packed.position_ids),
        loss_mask=rows(packed.loss_mask),
        behavior_log_probs=rows(packed.behavior_log_probs),
        advantages=rows(packed.advantages),
        loss_weight=rows(packed.loss_weight),
        versions=rows(packed.versions, -1),
        temperatures=rows(packed.temperatures),
        turn_ids=rows(packed.turn_ids, -1),
        lengths=lengths,
        prompt_lengths=packed.prompt_lengths,
        rewards=packed.rewards,
        trace_index=packed.trace_index,
        group_index=packed.group_index,
        session_index=packed.session_index,
        returns=rows(packed.returns),
        token_rewards=None if packed.token_rewards is None else rows(packed.token_rewards),
        extras={name: rows(values, missing(values.dtype)) for name, values in packed.extras.items()},
    )


class _Rows:
    """Copies packed values [T, ...] into rows [N, S, ...]. Every row is one block copy; no mask over [N, S] is made."""

    def __init__(self, cu_seqlens: npt.NDArray[np.int32], width: int, side: Side) -> None:
        if side not in ("left", "right"):
            raise ValueError(f"side is 'left' or 'right', not {side!r}")
        self._bounds = list(pairwise(cu_seqlens.tolist()))
        self._width, self._is_left = width, side == "left"

    def __call__(self, values: npt.NDArray[Any], fill: float = 0) -> npt.NDArray[Any]:
        shape = (len(self._bounds), self._width, *values.shape[1:])
        # Zeros cost nothing until they are touched; any other padding is written to the padded cells only.
        padded = np.zeros(shape, values.dtype) if fill == 0 else np.empty(shape, values.dtype)
        for row, (start, stop) in zip(padded, self._bounds, strict=True):
            first = self._width - (stop - start) if self._is_left else 0
            last = first + stop - start
            row[first:last] = values[start:stop]
            if fill != 0:
                row[:first] = fill
                row[last:] = fill
        return padded
