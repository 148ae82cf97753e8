"""Weight updates: while a policy is paused, new calls for it wait in front of the engine (rule A12).

The gates of one replica; `rollmill_capture.coordination.policy_pauses` opens and closes them as all replicas
have agreed.
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
class _Gate:
    open: asyncio.Event = field(default_factory=asyncio.Event)
    mode: PauseMode | None = None
    last: PauseMode | None = None
    since: float = 0.0
    running: int = 0
    waiting: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open.set()
        self.idle.set()


class CallGates:
    """One gate per policy. ``seconds`` bounds how long a call waits at a closed one."""

    def __init__(self, seconds: float = 900.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._gates: dict[str, _Gate] = {}

    @asynccontextmanager
    async def passage(self, policy: str) -> AsyncIterator[None]:
        """Inside, a call of the policy is in flight; entered only while the policy is not paused.

        Raises PausedTooLongError.
        """
        await self.opened(policy)
        gate = self._gate(policy)
        gate.running += 1
        gate.idle.clear()
        try:
            yield
        finally:
            gate.running -= 1
            if not gate.running:
                gate.idle.set()

    async def opened(self, policy: str) -> None:
        """Wait until the policy is not paused. Raises PausedTooLongError."""
        gate = self._gate(policy)
        gate.waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                # Again: a second pause may have come before this call had its turn.
                while gate.mode is not None:
                    await gate.open.wait()
        except TimeoutError:
            raise PausedTooLongError(
                f"policy {policy!r} is paused for a weight update since {self._now() - gate.since:.0f} s", retry_after=5
            ) from None
        finally:
            gate.waiting -= 1

    def pause(self, policy: str, mode: PauseMode) -> None:
        """Calls of the policy that come now wait; a second pause only changes the mode."""
        gate = self._gate(policy)
        gate.since = self._now() if gate.mode is None else gate.since
        gate.mode = gate.last = mode
        gate.open.clear()

    def resume(self, policy: str) -> None:
        gate = self._gate(policy)
        gate.mode = None
        gate.open.set()

    def continues(self, policy: str) -> bool:
        """Whether a reply that the engine breaks off is one for capture to continue: the last pause said so."""
        return self._gate(policy).last is PauseMode.ABORT_RESUME

    async def idle(self, policy: str, seconds: float) -> bool:
        """Wait until no call of the policy is in flight; False: ``seconds`` were over before."""
        try:
            async with asyncio.timeout(seconds):
                await self._gate(policy).idle.wait()
        except TimeoutError:
            return False
        return True

    def status(self, policy: str) -> dict[str, Any]:
        gate = self._gate(policy)
        paused = gate.mode is not None
        return {
            "paused": paused,
            "mode": gate.mode.value if gate.mode is not None else None,
            "paused_seconds": self._now() - gate.since if paused else 0.0,
            "in_flight": gate.running,
            "waiting": gate.waiting if paused else 0,
        }

    def _gate(self, policy: str) -> _Gate:
        return self._gates.setdefault(policy, _Gate())
