"""Which offsets of one partition are finished, and how that is written into a commit (rule V1). Pure.

Records finish in any order. What is committed is the low watermark: the first offset that is not finished. What is
finished above it goes into the commit's metadata as run lengths, so that a restart repeats only what was running.
Offsets have gaps (transaction markers): an offset that was passed over counts as finished.
"""

from __future__ import annotations

from dataclasses import dataclass

Runs = tuple[tuple[int, int], ...]
"""Disjoint ranges of offsets, start inclusive, stop exclusive, in order."""

METADATA_LIMIT = 4096
"""Bytes; the broker's default for ``offset.metadata.max.bytes``."""
FORMAT = "r1:"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Mark:
    """What a commit says: everything below ``offset`` is finished, and so is everything in ``finished`` above it."""

    offset: int
    finished: Runs = ()


class Progress:
    """The bookkeeping of one partition. Offsets begin in rising order and finish in any."""

    def __init__(self, mark: Mark) -> None:
        self._position = mark.offset
        self._ahead = mark.finished
        self._running: dict[int, None] = {}

    @property
    def position(self) -> int:
        """The next offset to read."""
        return self._position

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self, offset: int) -> bool:
        """True: the record is to be handled. False: it is finished or running already (B102)."""
        if offset < self._position:
            return False
        self._position = offset + 1
        self._ahead = tuple((max(start, offset), stop) for start, stop in self._ahead if stop > offset)
        if self._ahead and self._ahead[0][0] == offset:
            return False
        self._running[offset] = None
        return True

    def finish(self, offset: int) -> None:
        self._running.pop(offset, None)

    def pass_to(self, position: int) -> None:
        """Everything below ``position`` has been delivered: what was not seen does not exist."""
        self._position = max(self._position, position)

    def mark(self) -> Mark:
        """What may be committed now."""
        done = _joined((*self._finished_behind(), *self._ahead))
        low = next(iter(self._running), self._position)
        while done and done[0][0] <= low:
            low = max(low, done[0][1])
            done = done[1:]
        return Mark(low, done)

    def _finished_behind(self) -> Runs:
        """The gaps between running offsets, up to the position."""
        edges = [*self._running, self._position]
        gaps = [(offset + 1, edges[index + 1]) for index, offset in enumerate(self._running)]
        return tuple((start, stop) for start, stop in gaps if start < stop)


def _joined(runs: Runs) -> Runs:
    """Sorted ranges with touching and overlapping ones melted together."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def encode(mark: Mark, limit: int = METADATA_LIMIT) -> str:
    """The metadata of a commit: lengths, alternately not finished and finished, from the watermark on, in base 36.

    Ranges that do not fit into ``limit`` bytes are left out, the highest first; they will be repeated.
    """
    text, at = "", mark.offset
    for start, stop in mark.finished:
        pair = f"{'.' if text else FORMAT}{_base36(start - at)}.{_base36(stop - start)}"
        if len(text) + len(pair) > limit:
            break
        text, at = text + pair, stop
    return text


def decode(offset: int, metadata: str) -> Mark:
    """The mark that a commit holds. Metadata of another origin counts as none."""
    try:
        lengths = [int(part, 36) for part in metadata.removeprefix(FORMAT).split(".")]
    except ValueError:
        return Mark(offset)
    if not metadata.startswith(FORMAT) or len(lengths) % 2 or min(lengths) < 1:
        return Mark(offset)
    runs: list[tuple[int, int]] = []
    at = offset
    for gap, length in zip(lengths[::2], lengths[1::2], strict=True):
        runs.append((at + gap, at + gap + length))
        at += gap + length
    return Mark(offset, tuple(runs))


def _base36(value: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, 36)
        digits = DIGITS[digit] + digits
    return digits or "0"
