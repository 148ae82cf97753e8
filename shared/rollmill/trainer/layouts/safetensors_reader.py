"""A micro-batch as it is stored in a Kafka record: safetensors, header and arrays read without a copy.

Layout of the format: 8 bytes little-endian length of a JSON object, the object, then the raw tensors. The object maps
each tensor's name to dtype, shape and byte range; ``__metadata__`` holds texts. The library's own reader
(`safetensors.numpy.load`) copies the arrays and gives no access to the header, hence this one; it bounds hostile input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from rollmill.errors import PoisonRecordError
from rollmill.models import EXTRA, EXTRA_SPANS, TENSORS, BatchHeader
from rollmill.models.extras import missing

HEADER = "header"
OPTIONAL = frozenset({"token_rewards"})
DTYPES = {"I32": "int32", "U8": "uint8", "F32": "float32", "I16": "int16"}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PackedBatch:
    """Header and arrays of one micro-batch; dtypes, shapes and meanings as in `rollmill.models.TENSORS`.

    The arrays are read-only views of the message's own bytes.
    """

    header: BatchHeader
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    behavior_log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    prompt_lengths: npt.NDArray[np.int32]
    trace_index: npt.NDArray[np.int32]
    group_index: npt.NDArray[np.int32]
    session_index: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    later_rewards: npt.NDArray[np.float32]
    loss_weights: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int32]
    token_rewards: npt.NDArray[np.float32] | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """By name; whatever the producer of the trajectories has added."""


@dataclass(frozen=True)
class Extra:
    """Values at some of the tokens, in spans."""

    values: npt.NDArray[Any]
    """[V, ...]"""
    spans: npt.NDArray[np.int32]
    """[S, 2], first token and number of tokens."""

    def is_aligned(self, tokens: int) -> bool:
        """Spans are in order, disjoint, inside [T], and have as many tokens as there are rows."""
        starts, counts = self.spans[:, 0], self.spans[:, 1]
        ends = starts + counts
        ordered = bool((counts >= 0).all() and (starts[1:] >= ends[:-1]).all() and (starts >= 0).all())
        return ordered and bool((ends <= tokens).all()) and int(counts.sum()) == len(self.values)

    def over(self, tokens: int) -> npt.NDArray[Any]:
        """[T, ...]; `rollmill.models.extras.missing` at tokens without a value."""
        spread = np.full((tokens, *self.values.shape[1:]), missing(self.values.dtype), self.values.dtype)
        row = 0
        for start, count in self.spans.tolist():
            spread[start : start + count] = self.values[row : row + count]
            row += count
        return spread


class _Entry(BaseModel):
    """One tensor's entry in the JSON object."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    shape: Annotated[list[NonNegativeInt], Field(max_length=4)]
    data_offsets: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


def _extra_names(layout: Mapping[str, _Entry]) -> list[str]:
    return [name.removeprefix(EXTRA) for name in layout if name.startswith(EXTRA)]


def _extra(name: str, layout: Mapping[str, _Entry], data: memoryview) -> Extra:
    entry, spans = layout[EXTRA + name], layout.get(EXTRA_SPANS + name)
    dtype = DTYPES.get(entry.dtype)
    if spans is None or dtype is None:
        raise PoisonRecordError("invalid", f"{EXTRA}{name} has no spans, or dtype {entry.dtype[:20]!r}")
    bounds = _view("int32 [S, 2]", EXTRA_SPANS + name, spans, data)
    if bounds.ndim != 2 or bounds.shape[1] != 2:  # noqa: PLR2004  # start and count
        raise PoisonRecordError("invalid", f"{EXTRA_SPANS}{name} has shape {bounds.shape}, int32 [S, 2] is expected")
    return Extra(_view(dtype, EXTRA + name, entry, data), bounds)


def read_batch(value: bytes) -> PackedBatch:
    """The micro-batch in a record's value.

    Raises PoisonRecordError ``malformed`` (no safetensors), or ``invalid`` (a tensor is missing, has another dtype or
    shape than in `TENSORS`, or the header is invalid).
    """
    header, layout, data = _split(value)
    arrays = {name: _view(TENSORS[name][0], name, layout[name], data) for name in TENSORS if name in layout}
    extras = {name: _extra(name, layout, data) for name in _extra_names(layout)}
    missing = set(TENSORS) - OPTIONAL - set(arrays)
    if missing:
        raise PoisonRecordError("invalid", f"tensors are missing: {', '.join(sorted(missing))}")
    batch = PackedBatch(header=header, extras=extras, **arrays)
    _check(batch)
    return batch


def _split(value: bytes) -> tuple[BatchHeader, dict[str, _Entry], memoryview]:
    size = int.from_bytes(value[:_LENGTH_BYTES], "little")
    body = memoryview(value)[_LENGTH_BYTES:]
    try:
        layout = orjson.loads(body[:size])
    except orjson.JSONDecodeError as error:
        raise PoisonRecordError("malformed", f"not safetensors: {error}") from error
    if not isinstance(layout, dict):
        raise PoisonRecordError("malformed", "not safetensors: its header is no JSON object")
    header = _header(layout.pop("__metadata__", None))
    try:
        entries = {name: _Entry.model_validate(entry) for name, entry in layout.items()}
    except ValidationError as error:
        raise PoisonRecordError("malformed", f"not safetensors: {error.error_count()} errors in an entry") from error
    return header, entries, body[size:]


def _header(metadata: object) -> BatchHeader:
    text = metadata.get(HEADER) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise PoisonRecordError("invalid", "the batch header is missing")
    try:
        return BatchHeader.model_validate_json(text)
    except ValidationError as error:
        raise PoisonRecordError("invalid", f"the batch header is invalid: {error}") from error


def _view(form: str, name: str, entry: _Entry, data: memoryview) -> npt.NDArray[Any]:
    wanted = form.split(maxsplit=1)[0]
    if DTYPES.get(entry.dtype) != wanted:
        raise PoisonRecordError("invalid", f"{name} has dtype {entry.dtype[:20]}, {wanted} is expected")
    start, stop = entry.data_offsets
    try:
        flat = np.frombuffer(data[start:stop], dtype=np.dtype(wanted).newbyteorder("<"))
        return flat.reshape(entry.shape)
    except (ValueError, OverflowError) as error:
        raise PoisonRecordError("malformed", f"{name}: {error}") from error


def _check(batch: PackedBatch) -> None:
    for name, (wanted, _) in TENSORS.items():
        array = getattr(batch, name)
        if array is not None and not _fits(array.shape, wanted, batch):
            raise PoisonRecordError("invalid", f"{name} has shape {array.shape}, {wanted} is expected")
    for name, extra in batch.extras.items():
        if not extra.is_aligned(len(batch.input_ids)):
            raise PoisonRecordError(
                "invalid", f"{EXTRA}{name} has {len(extra.values)} rows that do not match its spans"
            )
    if batch.loss_mask.max(initial=0) > 1:
        raise PoisonRecordError("invalid", "a value of loss_mask is neither 0 nor 1")
    if not _bounds_hold(batch):
        raise PoisonRecordError("invalid", "cu_seqlens, runs or trace_index point outside the batch")


def _fits(shape: tuple[int, ...], wanted: str, batch: PackedBatch) -> bool:
    traces, runs = len(batch.cu_seqlens) - 1, len(batch.turn_ids)
    known = {"T": len(batch.input_ids), "N": traces, "N + 1": traces + 1, "U": runs}
    sizes = wanted.partition("[")[2].rstrip("]").split(", ")
    expected = [known.get(size, int(size) if size.isdigit() else None) for size in sizes]
    return len(shape) == len(expected) and all(
        size is None or size == actual for size, actual in zip(expected, shape, strict=True)
    )


def _bounds_hold(batch: PackedBatch) -> bool:
    """Sequences tile [T], runs cover [T], and every trace names a row of the table and a group (-1: a filler's)."""
    tokens, bounds = len(batch.input_ids), batch.cu_seqlens
    tiled = bool(len(bounds) and bounds[0] == 0 and bounds[-1] == tokens and (np.diff(bounds) >= 0).all())
    covered = all(_cover(runs[:, -1], tokens) for runs in (batch.versions, batch.turn_ids))
    indices = ((batch.trace_index, len(batch.header.table)), (batch.group_index, len(batch.header.groups)))
    named = all(bool((index >= -1).all() and (index < count).all()) for index, count in indices)
    return tiled and covered and named


def _cover(lengths: npt.NDArray[np.int32], tokens: int) -> bool:
    return bool((lengths >= 0).all()) and int(lengths.sum(dtype=np.int64)) == tokens
