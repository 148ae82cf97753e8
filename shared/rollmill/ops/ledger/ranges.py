"""Ranges of tokens of one sampled reply, cut where any of them begins or ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Segment(Generic[T]):
    """Tokens ``start`` to ``stop`` (exclusive), which all of ``marks`` cover, in the order they were laid."""

    start: int
    stop: int
    marks: tuple[T, ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass
class Ranges(Generic[T]):
    """Marks on ranges; `segments` yields the pieces within which every mark holds or none does."""

    _laid: list[tuple[int, int, T]] = field(default_factory=list)

    def lay(self, start: int, stop: int, mark: T) -> None:
        if start < stop:
            self._laid.append((start, stop, mark))

    def copy(self) -> Ranges[T]:
        return Ranges(list(self._laid))

    def segments(self) -> Iterator[Segment[T]]:
        edges = _edges(self._laid)
        for start, stop in pairwise(edges):
            marks = tuple(mark for low, high, mark in self._laid if low <= start and stop <= high)
            if marks:
                yield Segment(start, stop, marks)


def _edges(laid: Iterable[tuple[int, int, object]]) -> list[int]:
    return sorted({edge for start, stop, _ in laid for edge in (start, stop)})
