"""Which replica of an upstream a session's calls go to: always the same one, as long as it is well.

The order of a session is by rendezvous hashing, so that its prefix cache is found again, and a replica that comes or
goes moves no other session. A replica that says it is busy, or cannot be reached, is left alone for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

FIRST_SECONDS = 0.5
"""Of rest after a failure; doubled by each that follows."""
UNREACHABLE_SECONDS = 15.0
"""Longest rest of a replica that cannot be reached."""


@dataclass
class _Health:
    failures: int = 0
    until: float = 0.0
    busy: bool = False
    """It asked for the rest itself; calls wait for its end, where there is no other replica."""


class LoadBalancer:
    """``seconds``: longest rest that a busy replica is given, whatever it asks for."""

    def __init__(self, seconds: float = 30.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._health: dict[str, _Health] = {}

    async def choose(self, urls: Sequence[str], session_id: str, tried: Collection[str] = ()) -> str:
        """The replica for a call: the session's first that is well, else the one that is so soonest; a busy one is
        waited for. ``tried``: those that this call has failed at.
        """
        left = [url for url in order_of(urls, session_id) if url not in tried]
        well = next((url for url in left if self._of(url).until <= self._now()), None)
        if well is not None:
            return well
        soonest = min(left, key=lambda url: self._of(url).until)
        if self._of(soonest).busy:
            await asyncio.sleep(self._of(soonest).until - self._now())
        return soonest

    def well(self, url: str) -> None:
        """It has answered."""
        health = self._health.pop(url, None)
        if health is not None and health.failures:
            structlog.get_logger().info("an upstream is well again", upstream=url)

    def busy(self, url: str, retry_after: str | None) -> None:
        """It asks for a rest, as the header ``retry-after`` says."""
        health = self._failed(url)
        asked = FIRST_SECONDS * 2.0 ** min(health.failures - 1, 10) if retry_after is None else _seconds(retry_after)
        health.until, health.busy = self._now() + min(asked, self._seconds), True

    def unreachable(self, url: str) -> None:
        health = self._failed(url)
        rest = min(FIRST_SECONDS * 2.0 ** min(health.failures - 1, 10), UNREACHABLE_SECONDS)
        health.until, health.busy = self._now() + rest, False

    def _failed(self, url: str) -> _Health:
        health = self._health.setdefault(url, _Health())
        health.failures += 1
        if health.failures == 1:
            structlog.get_logger().warning("an upstream is given a rest", upstream=url)
        return health

    def _of(self, url: str) -> _Health:
        return self._health.get(url, _Health())


def order_of(urls: Sequence[str], session_id: str) -> list[str]:
    """All replicas, the session's own first."""
    if len(urls) == 1:
        return list(urls)
    return sorted(urls, key=lambda url: hashlib.blake2b(f"{session_id} {url}".encode(), digest_size=8).digest())


def _seconds(retry_after: str) -> float:
    """A number of seconds; a date, which nobody sends, or what is no number counts as one second."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return 1.0
    return 1.0 if math.isnan(seconds) else max(seconds, 0.0)
