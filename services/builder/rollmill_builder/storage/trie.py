"""A tree of byte sequences that share their beginnings: what is common is held once, and compared once.

A sequence that carries on where an earlier one ends is appended to it, so that a conversation of any number of turns
is one segment. One that differs from there on becomes a segment of its own. Nothing stored ever changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rollmill_builder.storage.buffer import Buffer, Bytes


class TriePosition(NamedTuple):
    """A position in a trie: it stands for the bytes from the root to it."""

    segment: int
    end: int
    """Bytes from the root."""


ROOT = TriePosition(0, 0)


class _Segment:
    """Bytes that follow position ``at`` of the segment ``parent``."""

    __slots__ = ("at", "data", "parent")

    def __init__(self, parent: int, at: int, data: Bytes) -> None:
        self.parent, self.at, self.data = parent, at, Buffer(data)


class Trie:
    """Grows by `insert`. ``unit``: bytes that belong together, 4 for token ids; no sequence is split inside one."""

    __slots__ = ("_forks", "_segments", "_unit")

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._segments = [_Segment(0, 0, b"")]
        self._forks: dict[tuple[int, int, bytes], int] = {}

    def find(self, content: Bytes, start: TriePosition = ROOT) -> TriePosition:
        """The end of the longest stored sequence that ``content``, put after ``start``, begins with.

        Compares every byte of ``content`` at most once with a stored one.
        """
        rest = memoryview(content)
        number, position = start
        while rest:
            segment = self._segments[number]
            same = segment.data.common(position - segment.at, rest, self._unit)
            position += same
            rest = rest[same:]
            fork = self._forks.get((number, position, bytes(rest[: self._unit]))) if self._forks else None
            if fork is None:
                break
            number = fork
        return TriePosition(number, position)

    def insert(self, content: Bytes, start: TriePosition = ROOT) -> TriePosition:
        """The place of ``content`` after ``start``; what is not held yet is added."""
        segment = self._segments[start.segment]
        if start.end == segment.at + segment.data.size:
            return self._extend(start, content)
        place = self.find(content, start)
        return self._extend(place, content[place.end - start.end :])

    def _extend(self, place: TriePosition, rest: Bytes) -> TriePosition:
        """``place`` is where `find` ends for the whole."""
        if not rest:
            return place
        number, position = place
        segment = self._segments[number]
        if position == segment.at + segment.data.size:
            segment.data.append(rest)
            return TriePosition(number, position + len(rest))
        made = len(self._segments)
        self._segments.append(_Segment(number, position, rest))
        self._forks[number, position, bytes(rest[: self._unit])] = made
        return TriePosition(made, position + len(rest))

    def ancestor(self, place: TriePosition, end: int) -> TriePosition:
        """The first ``end`` bytes of what ``place`` stands for."""
        number = place.segment
        while number and end <= self._segments[number].at:
            number = self._segments[number].parent
        return TriePosition(number, end)

    def is_prefix(self, place: TriePosition, other: TriePosition) -> bool:
        """Whether what ``other`` stands for begins with what ``place`` stands for."""
        return place.end <= other.end and self.ancestor(other, place.end) == place

    def read(self, place: TriePosition, start: int = 0) -> bytes:
        """Bytes ``start`` up to ``place``."""
        segment = self._segments[place.segment]
        if segment.at <= start:
            return segment.data.read(start - segment.at, place.end - segment.at)
        parts = []
        for number, end in self.path(place):
            segment = self._segments[number]
            parts.append(segment.data.read(max(start - segment.at, 0), end - segment.at))
            if segment.at <= start:
                break
        return b"".join(reversed(parts))

    def path(self, place: TriePosition) -> Iterator[TriePosition]:
        """``place``, then where its segment leaves the one before, up to the root."""
        yield place
        number = place.segment
        while number:
            segment = self._segments[number]
            number = segment.parent
            yield TriePosition(number, segment.at)

    def leaves_at(self) -> list[TriePosition]:
        """For each segment, where it leaves its parent. A parent comes before its children."""
        return [TriePosition(segment.parent, segment.at) for segment in self._segments]

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(segment.data.size for segment in self._segments)

    def dump(self) -> list[Any]:
        """Plain data that `load` reads."""
        return [(segment.parent, segment.at, segment.data.read(0, segment.data.size)) for segment in self._segments]

    @classmethod
    def load(cls, unit: int, data: list[Any]) -> Trie:
        trie = cls(unit)
        trie._segments = [_Segment(parent, at, content) for parent, at, content in data]
        for number, (parent, at, content) in enumerate(data[1:], 1):
            trie._forks[parent, at, content[:unit]] = number
        return trie
