"""Marks on ranges of tokens, and the pieces that they cut them into. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Segment(Generic[T]):
    """Tokens ``start`` to ``stop`` (exclusive), which all of ``marks`` cover, in the order in which they were set."""

    start: int
    stop: int
    marks: tuple[T, ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass
class Ranges(Generic[T]):
    """Marks on ranges; `segments` yields the pieces within which every mark holds or none does."""

    _marks: list[tuple[int, int, T]] = field(default_factory=list)

    def mark(self, start: int, stop: int, mark: T) -> None:
        if start < stop:
            self._marks.append((start, stop, mark))

    def marks(self) -> Iterator[T]:
        return (mark for _, _, mark in self._marks)

    def copy(self) -> Ranges[T]:
        return Ranges(list(self._marks))

    def segments(self) -> Iterator[Segment[T]]:
        edges = _edges(self._marks)
        for start, stop in pairwise(edges):
            marks = tuple(mark for low, high, mark in self._marks if low <= start and stop <= high)
            if marks:
                yield Segment(start, stop, marks)


def _edges(marks: Iterable[tuple[int, int, object]]) -> list[int]:
    return sorted({edge for start, stop, _ in marks for edge in (start, stop)})
