"""Bytes that only grow, held in pieces that never move: many buffers that grow side by side leave no holes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Bytes = bytes | memoryview
"""Bytes; a view has to be one of bytes, too."""

TOKEN_BYTES = 4

FIRST_LOOK = 512
"""Units compared first: most sequences that differ do so early."""
LEAST_PIECE = 4096
SHARE = 2
"""A piece has a quarter (2^-2) of the buffer at least: few pieces to compare, and little to move while one grows."""


class Buffer:
    """Grows by `append`. The last piece is the one that grows."""

    __slots__ = ("_pieces", "size")

    def __init__(self, content: Bytes) -> None:
        self._pieces = [bytearray(content)]
        self.size = len(content)

    def append(self, content: Bytes) -> None:
        last = self._pieces[-1]
        if len(last) >= max(LEAST_PIECE, self.size >> SHARE):
            self._pieces[-1] = bytearray(last)  # without the room that it kept for growing
            self._pieces.append(bytearray(content))
        else:
            last += content
        self.size += len(content)

    def read(self, start: int, stop: int) -> bytes:
        parts = []
        for at, piece in self._placed():
            if at >= stop:
                break
            parts.append(piece[max(start - at, 0) : stop - at])
        return b"".join(parts)

    def common(self, start: int, other: memoryview, unit: int) -> int:
        """Number of bytes, whole units, that the buffer from ``start`` on and ``other`` begin with alike."""
        position = 0
        for at, piece in self._placed():
            end = at + len(piece) - start
            if end <= 0:
                continue
            if at < start or piece != other[position:end]:
                skipped = max(start - at, 0)
                position += _common(piece, skipped, other[position:], unit)
                if position < end:
                    return position
            position = end
        return position

    def _placed(self) -> Iterator[tuple[int, bytearray]]:
        at = 0
        for piece in self._pieces:
            yield at, piece
            at += len(piece)


def _common(data: bytearray, offset: int, other: memoryview, unit: int) -> int:
    count = min(len(data) - offset, len(other)) // unit
    head = min(count, FIRST_LOOK)
    same = _equal_units(data, offset, other, unit, head)
    return (same if same < head else _equal_units(data, offset, other, unit, count)) * unit


def _equal_units(data: bytearray, offset: int, other: memoryview, unit: int, count: int) -> int:
    if not count:
        return 0
    kind = np.int32 if unit == TOKEN_BYTES else np.uint8
    unequal = np.frombuffer(data, kind, count, offset) != np.frombuffer(other, kind, count)
    at = int(unequal.argmax())
    return at if unequal[at] else count
