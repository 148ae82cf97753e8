"""An event loop in which waiting takes no time: where nothing is ready, the clock jumps to the next timer.

Deadlines, back-offs and timers of the code under test keep their order and take no time. Only for code that waits for
nothing outside of the loop: no sockets, no threads.
"""

from __future__ import annotations

import asyncio
import selectors


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its ``time`` begins at 0 and advances by the waits alone, so that every run is the same."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
