"""Bounded retries of what raises RetryableError: with growing waits, or after the wait that a service asks for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import stamina

from rollmill.errors import RetryableError

R = TypeVar("R")

LONGEST_WAIT = 60.0
"""Seconds; a service that asks for a longer wait is tried again after this one."""


@dataclass(frozen=True)
class Retries:
    """How many tries, and with which waits."""

    attempts: int | None
    """None: until the time is over."""
    first_wait: float
    """Seconds before the second try; doubled, with jitter, before each further one."""
    longest: float = 5.0
    """Longest of these waits, in seconds."""

    async def run(self, attempt: Callable[[float], Awaitable[R]], seconds: float) -> R:
        """What ``attempt`` returns; it takes the seconds that are left. Raises what the last try raised."""
        deadline = time.monotonic() + seconds
        async for try_ in stamina.retry_context(
            on=_retry_wait,
            attempts=self.attempts,
            timeout=seconds,
            wait_initial=self.first_wait,
            wait_max=self.longest,
            wait_jitter=self.first_wait,
        ):
            with try_:
                return await attempt(max(0.0, deadline - time.monotonic()))
        raise RuntimeError("no try was made")


def _retry_wait(error: Exception) -> bool | float:
    """False: no. True: after the usual wait. A number: after that many seconds."""
    if not isinstance(error, RetryableError):
        return False
    wait: float | None = getattr(error, "retry_after", None)
    return True if wait is None else min(max(wait, 0.0), LONGEST_WAIT)
