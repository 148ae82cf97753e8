"""Output within a cap: a head and a tail of it, the rest only counted."""

from __future__ import annotations

from collections import deque

from rollmill.strategies.sandbox import Output


class CappedOutput:
    """Takes bytes as they come and keeps at most ``limit`` of them: the first half, and the last half."""

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        room = self._head_limit - len(self._head)
        self._head += chunk[:room]
        if rest := chunk[room:]:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            self._shorten()

    def _shorten(self) -> None:
        """Drop whole chunks that are surely out of the tail."""
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_limit:
            gone = len(self._tail.popleft())
            self._tail_bytes -= gone
            self._dropped += gone

    def kept(self) -> Output:
        tail = b"".join(self._tail)
        over = max(0, len(tail) - self._tail_limit)
        return Output(bytes(self._head), tail[over:], self._dropped + over)
