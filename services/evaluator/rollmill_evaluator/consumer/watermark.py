"""Which offsets of one partition are finished, and how that is encoded in a commit (rule V1). Pure.

Records finish in any order. What is committed is the low watermark: the first offset that is not finished. What is
finished above it goes into the commit's metadata as run lengths, so that a restart repeats only what was running.
Offsets have gaps (transaction markers): an offset that the consumer skipped counts as finished.
"""

from __future__ import annotations

from dataclasses import dataclass

OffsetRanges = tuple[tuple[int, int], ...]
"""Disjoint ranges of offsets, start inclusive, stop exclusive, in order."""

METADATA_LIMIT = 4096
"""Bytes; the broker's default for ``offset.metadata.max.bytes``."""
FORMAT = "r1:"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Watermark:
    """Content of a commit: all offsets below ``offset`` are finished, and so are the ranges ``finished`` above it."""

    offset: int
    finished: OffsetRanges = ()


class OffsetTracker:
    """Running and finished offsets of one partition. Offsets begin in rising order and finish in any order."""

    def __init__(self, watermark: Watermark) -> None:
        self._position = watermark.offset
        self._finished_ahead = watermark.finished
        self._running: dict[int, None] = {}

    @property
    def position(self) -> int:
        """The next offset to read."""
        return self._position

    def begin(self, offset: int) -> bool:
        """True: the record is to be handled. False: it is finished or running already (B102)."""
        if offset < self._position:
            return False
        self._position = offset + 1
        self._finished_ahead = tuple(
            (max(start, offset), stop) for start, stop in self._finished_ahead if stop > offset
        )
        if self._finished_ahead and self._finished_ahead[0][0] == offset:
            return False
        self._running[offset] = None
        return True

    def finish(self, offset: int) -> None:
        self._running.pop(offset, None)

    def advance_to(self, position: int) -> None:
        """All records below ``position`` have been delivered: an offset there that never began has no record."""
        self._position = max(self._position, position)

    def watermark(self) -> Watermark:
        """What may be committed now."""
        done = _merged((*self._finished_behind(), *self._finished_ahead))
        low = next(iter(self._running), self._position)
        while done and done[0][0] <= low:
            low = max(low, done[0][1])
            done = done[1:]
        return Watermark(low, done)

    def _finished_behind(self) -> OffsetRanges:
        """The gaps between running offsets, up to the position."""
        edges = [*self._running, self._position]
        gaps = [(offset + 1, edges[index + 1]) for index, offset in enumerate(self._running)]
        return tuple((start, stop) for start, stop in gaps if start < stop)


def _merged(runs: OffsetRanges) -> OffsetRanges:
    """Sorted ranges, touching and overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def encode(watermark: Watermark, limit: int = METADATA_LIMIT) -> str:
    """The metadata of a commit: lengths, alternately not finished and finished, from the watermark on, in base 36.

    Ranges that do not fit into ``limit`` bytes are left out, the highest first; their records will be repeated.
    """
    text, at = "", watermark.offset
    for start, stop in watermark.finished:
        pair = f"{'.' if text else FORMAT}{_base36(start - at)}.{_base36(stop - start)}"
        if len(text) + len(pair) > limit:
            break
        text, at = text + pair, stop
    return text


def decode(offset: int, metadata: str) -> Watermark:
    """The watermark that a commit holds. Metadata that `encode` did not write is ignored."""
    try:
        lengths = [int(part, 36) for part in metadata.removeprefix(FORMAT).split(".")]
    except ValueError:
        return Watermark(offset)
    if not metadata.startswith(FORMAT) or len(lengths) % 2 or min(lengths) < 1:
        return Watermark(offset)
    runs: list[tuple[int, int]] = []
    at = offset
    for gap, length in zip(lengths[::2], lengths[1::2], strict=True):
        runs.append((at + gap, at + gap + length))
        at += gap + length
    return Watermark(offset, tuple(runs))


def _base36(value: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, 36)
        digits = DIGITS[digit] + digits
    return digits or "0"
