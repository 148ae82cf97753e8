"""Weight updates: while a policy is paused, new calls for it wait in front of the engine (rule A12).

The pauses of one replica; `rollmill_capture.coordination.policy_pauses` starts and ends them as all replicas have
agreed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollmill.errors import BackpressureError
from rollmill.models import PauseMode


class PausedTooLongError(BackpressureError):
    """A call has waited for the end of a pause for as long as it may."""


@dataclass
class _PolicyCalls:
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    mode: PauseMode | None = None
    """None: not paused."""
    last_mode: PauseMode | None = None
    paused_at: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.resumed.set()
        self.idle.set()


class PausedPolicies:
    """Which policies are paused, and their calls. ``seconds`` bounds how long a call waits for the end of a pause."""

    def __init__(self, seconds: float = 900.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._policies: dict[str, _PolicyCalls] = {}

    @asynccontextmanager
    async def in_flight(self, policy: str) -> AsyncIterator[None]:
        """Inside, a call of the policy is in flight; entered only while the policy is not paused.

        Raises PausedTooLongError.
        """
        await self.wait_until_resumed(policy)
        calls = self._calls(policy)
        calls.in_flight += 1
        calls.idle.clear()
        try:
            yield
        finally:
            calls.in_flight -= 1
            if not calls.in_flight:
                calls.idle.set()

    async def wait_until_resumed(self, policy: str) -> None:
        """Raises PausedTooLongError."""
        calls = self._calls(policy)
        calls.waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                # Again: a second pause may have come before this call had its turn.
                while calls.mode is not None:
                    await calls.resumed.wait()
        except TimeoutError:
            raise PausedTooLongError(
                f"policy {policy!r} is paused for a weight update since {self._now() - calls.paused_at:.0f} s",
                retry_after=5,
            ) from None
        finally:
            calls.waiting -= 1

    def pause(self, policy: str, mode: PauseMode) -> None:
        """Calls of the policy that come now wait; a second pause only changes the mode."""
        calls = self._calls(policy)
        calls.paused_at = self._now() if calls.mode is None else calls.paused_at
        calls.mode = calls.last_mode = mode
        calls.resumed.clear()

    def resume(self, policy: str) -> None:
        calls = self._calls(policy)
        calls.mode = None
        calls.resumed.set()

    def continues_aborted(self, policy: str) -> bool:
        """Whether capture continues a reply that the engine breaks off: the mode of the last pause decides."""
        return self._calls(policy).last_mode is PauseMode.ABORT_RESUME

    async def wait_until_idle(self, policy: str, seconds: float) -> bool:
        """Wait until no call of the policy is in flight; False: ``seconds`` were over before."""
        try:
            async with asyncio.timeout(seconds):
                await self._calls(policy).idle.wait()
        except TimeoutError:
            return False
        return True

    def status(self, policy: str) -> dict[str, Any]:
        calls = self._calls(policy)
        paused = calls.mode is not None
        return {
            "paused": paused,
            "mode": calls.mode.value if calls.mode is not None else None,
            "paused_seconds": self._now() - calls.paused_at if paused else 0.0,
            "in_flight": calls.in_flight,
            "waiting": calls.waiting if paused else 0,
        }

    def _calls(self, policy: str) -> _PolicyCalls:
        return self._policies.setdefault(policy, _PolicyCalls())
