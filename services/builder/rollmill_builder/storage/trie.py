"""A tree of byte sequences that share their beginnings: what is common is stored once, and compared once.

A sequence that carries on where an earlier one ends is appended to it, so that a conversation of any number of turns
is one segment. One that differs from there on becomes a segment of its own. Nothing stored ever changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ROOT", "TOKEN_BYTES", "Buffer", "Bytes", "Trie", "TriePosition"]

Bytes = bytes | memoryview
"""Bytes; a view has to be one of bytes, too."""

TOKEN_BYTES = 4

FIRST_COMPARED = 512
"""Units compared first: most sequences that differ do so early."""
MIN_PIECE_BYTES = 4096
PIECE_SHARE_BITS = 2
"""A piece has a quarter (2^-2) of the buffer at least: few pieces to compare, and little to move while one grows."""


class Buffer:
    """Bytes that only grow, in pieces that never move: many buffers that grow side by side leave no holes in memory.

    Grows by `append`. The last piece is the one that grows.
    """

    __slots__ = ("_pieces", "size")

    def __init__(self, content: Bytes) -> None:
        self._pieces = [bytearray(content)]
        self.size = len(content)

    def append(self, content: Bytes) -> None:
        last = self._pieces[-1]
        if len(last) >= max(MIN_PIECE_BYTES, self.size >> PIECE_SHARE_BITS):
            self._pieces[-1] = bytearray(last)  # a copy without the spare capacity that the piece had for growing
            self._pieces.append(bytearray(content))
        else:
            last += content
        self.size += len(content)

    def read(self, start: int, stop: int) -> bytes:
        parts = []
        for offset, piece in self._pieces_with_offsets():
            if offset >= stop:
                break
            parts.append(piece[max(start - offset, 0) : stop - offset])
        return b"".join(parts)

    def common_prefix(self, start: int, other: memoryview, unit: int) -> int:
        """Number of bytes, in whole units, that the buffer from ``start`` on and ``other`` have in common."""
        equal = 0
        for offset, piece in self._pieces_with_offsets():
            end = offset + len(piece) - start
            if end <= 0:
                continue
            if offset < start or piece != other[equal:end]:
                skipped = max(start - offset, 0)
                equal += _common_prefix(piece, skipped, other[equal:], unit)
                if equal < end:
                    return equal
            equal = end
        return equal

    def _pieces_with_offsets(self) -> Iterator[tuple[int, bytearray]]:
        offset = 0
        for piece in self._pieces:
            yield offset, piece
            offset += len(piece)


def _common_prefix(data: bytearray, offset: int, other: memoryview, unit: int) -> int:
    count = min(len(data) - offset, len(other)) // unit
    first = min(count, FIRST_COMPARED)
    equal = _equal_units(data, offset, other, unit, first)
    return (equal if equal < first else _equal_units(data, offset, other, unit, count)) * unit


def _equal_units(data: bytearray, offset: int, other: memoryview, unit: int, count: int) -> int:
    if not count:
        return 0
    dtype = np.int32 if unit == TOKEN_BYTES else np.uint8
    unequal = np.frombuffer(data, dtype, count, offset) != np.frombuffer(other, dtype, count)
    first = int(unequal.argmax())
    return first if unequal[first] else count


class TriePosition(NamedTuple):
    """A position in a trie. It identifies one sequence: the bytes from the root to it."""

    segment: int
    end: int
    """Bytes from the root."""


ROOT = TriePosition(0, 0)


class _Segment:
    """Bytes that follow offset ``start`` (from the root) of the segment ``parent``."""

    __slots__ = ("data", "parent", "start")

    def __init__(self, parent: int, start: int, data: Bytes) -> None:
        self.parent, self.start, self.data = parent, start, Buffer(data)


class Trie:
    """Grows by `insert`. ``unit``: bytes that belong together, 4 for token ids; no sequence is split inside one."""

    __slots__ = ("_forks", "_segments", "_unit")

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._segments = [_Segment(0, 0, b"")]
        self._forks: dict[tuple[int, int, bytes], int] = {}
        """Segments by (parent, start, first unit)."""

    def find(self, content: Bytes, start: TriePosition = ROOT) -> TriePosition:
        """The end of the longest stored sequence that ``content``, put after ``start``, begins with.

        Compares every byte of ``content`` at most once with a stored one.
        """
        rest = memoryview(content)
        number, end = start
        while rest:
            segment = self._segments[number]
            equal = segment.data.common_prefix(end - segment.start, rest, self._unit)
            end += equal
            rest = rest[equal:]
            fork = self._forks.get((number, end, bytes(rest[: self._unit]))) if self._forks else None
            if fork is None:
                break
            number = fork
        return TriePosition(number, end)

    def insert(self, content: Bytes, start: TriePosition = ROOT) -> TriePosition:
        """The position of ``content`` after ``start``; what is not stored yet is added."""
        segment = self._segments[start.segment]
        if start.end == segment.start + segment.data.size:
            return self._extend(start, content)
        found = self.find(content, start)
        return self._extend(found, content[found.end - start.end :])

    def _extend(self, found: TriePosition, rest: Bytes) -> TriePosition:
        """``found`` is where `find` ends for the whole."""
        if not rest:
            return found
        number, end = found
        segment = self._segments[number]
        if end == segment.start + segment.data.size:
            segment.data.append(rest)
            return TriePosition(number, end + len(rest))
        added = len(self._segments)
        self._segments.append(_Segment(number, end, rest))
        self._forks[number, end, bytes(rest[: self._unit])] = added
        return TriePosition(added, end + len(rest))

    def ancestor(self, position: TriePosition, end: int) -> TriePosition:
        """The position of the first ``end`` bytes of the sequence at ``position``."""
        number = position.segment
        while number and end <= self._segments[number].start:
            number = self._segments[number].parent
        return TriePosition(number, end)

    def is_prefix(self, position: TriePosition, other: TriePosition) -> bool:
        """Whether the sequence at ``other`` begins with the one at ``position``."""
        return position.end <= other.end and self.ancestor(other, position.end) == position

    def read(self, position: TriePosition, start: int = 0) -> bytes:
        """Bytes ``start`` up to ``position``."""
        segment = self._segments[position.segment]
        if segment.start <= start:
            return segment.data.read(start - segment.start, position.end - segment.start)
        parts = []
        for number, end in self.path(position):
            segment = self._segments[number]
            parts.append(segment.data.read(max(start - segment.start, 0), end - segment.start))
            if segment.start <= start:
                break
        return b"".join(reversed(parts))

    def path(self, position: TriePosition) -> Iterator[TriePosition]:
        """``position``, then where its segment leaves its parent, and so on up to the root."""
        yield position
        number = position.segment
        while number:
            segment = self._segments[number]
            number = segment.parent
            yield TriePosition(number, segment.start)

    def branch_points(self) -> list[TriePosition]:
        """For each segment, where it leaves its parent. A parent comes before its children."""
        return [TriePosition(segment.parent, segment.start) for segment in self._segments]

    @property
    def size(self) -> int:
        """Bytes stored."""
        return sum(segment.data.size for segment in self._segments)

    def dump(self) -> list[Any]:
        """Plain data that `load` reads: (parent, start, bytes) of each segment."""
        return [(segment.parent, segment.start, segment.data.read(0, segment.data.size)) for segment in self._segments]

    @classmethod
    def load(cls, unit: int, data: list[Any]) -> Trie:
        trie = cls(unit)
        trie._segments = [_Segment(parent, start, content) for parent, start, content in data]
        for number, (parent, start, content) in enumerate(data[1:], 1):
            trie._forks[parent, start, content[:unit]] = number
        return trie
