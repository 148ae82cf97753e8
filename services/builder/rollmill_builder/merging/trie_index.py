"""Positions in a trie that mean something: on the way from any place to the root, the next one is found at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Generic, TypeVar

from rollmill_builder.storage.trie import Trie, TriePosition

T = TypeVar("T")


class TrieIndex(Generic[T]):
    """Items by the places they stand at; several may stand at one, in the order given."""

    def __init__(self, trie: Trie, items: Iterable[tuple[TriePosition, T]]) -> None:
        self._items: dict[TriePosition, list[T]] = {}
        for place, item in items:
            self._items.setdefault(place, []).append(item)
        self._ends: dict[int, list[int]] = {}
        for segment, end in sorted(self._items):
            self._ends.setdefault(segment, []).append(end)
        self._above: list[TriePosition | None] = []
        """For each segment, the mark at or above the place where it leaves its parent."""
        for number, leaves in enumerate(trie.leaves_at()):
            self._above.append(self.nearest(leaves) if number else None)

    def __bool__(self) -> bool:
        return bool(self._items)

    def at(self, place: TriePosition) -> list[T]:
        return self._items.get(place, [])

    def nearest(self, place: TriePosition, *, above: bool = False) -> TriePosition | None:
        """The last mark on the way from the root to ``place``, which counts itself unless ``above``."""
        ends = self._ends.get(place.segment, [])
        count = (bisect_left if above else bisect_right)(ends, place.end)
        return TriePosition(place.segment, ends[count - 1]) if count else self._above[place.segment]
