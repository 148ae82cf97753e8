"""What capture knows of each policy: the announced version, and whether a weight update pauses it (rules A8, A12, R1).

`AnnouncedVersions` and `version_span` say which version sampled a call. `PausedPolicies` holds the calls of this
replica in front of the engine; `PolicyPauses` applies the pauses that all replicas share, as they are read from the
topic ``sessions``. The pause with the highest number counts, so that no clock decides and an echo of an older one
changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from rollmill.errors import BackpressureError
from rollmill.models import PauseMode, PolicyAnnouncement, PolicyPause, PolicySpan, PolicyVersion
from rollmill.models.versions import LARGEST_VERSION, skips_epochs
from rollmill_capture.model_config import Route, VersionSource

log = structlog.get_logger(__name__)

_STAMP = re.compile(r"(?:(\d{1,9}):)?(\d{1,18})")


class AnnouncedVersions:
    """The newest announced version of each policy; (0, 0) before any announcement."""

    def __init__(self) -> None:
        self._newest: dict[str, PolicyVersion] = {}
        self._stale: set[str] = set()

    def apply(self, _key: str, announcement: PolicyAnnouncement | None) -> None:
        if announcement is not None:
            self.learn(announcement.policy, announcement.version)

    def learn(self, policy: str, version: PolicyVersion) -> None:
        """The engines have loaded a version; an older one, and one that skips epochs (rule R1), changes nothing."""
        known = self._newest.get(policy)
        if skips_epochs(version, known):
            log.warning("a policy version skips epochs and is ignored", policy=policy, version=str(version))
            return
        if known is not None and version > known:
            self._stale.add(policy)
        self._newest[policy] = version if known is None else max(known, version)

    def caches_reset(self, policy: str) -> None:
        """The engines hold nothing that older weights have computed."""
        self._stale.discard(policy)

    def caches_may_be_stale(self, policy: str) -> bool:
        """Whether weights have changed since the engines' prefix caches were known to be empty."""
        return policy in self._stale

    def newest(self, policy: str) -> PolicyVersion:
        return self._newest.get(policy, PolicyVersion())


def version_span(route: Route, stamps: Sequence[str], before: PolicyVersion, after: PolicyVersion) -> PolicySpan:
    """The versions of one call. ``stamps``: as the engine reports them; ``before`` and ``after``: as announced.

    An engine that reports nothing readable is taken to run what was announced.
    """
    if route.version_source is VersionSource.FIXED:
        return PolicySpan(name=route.policy, before=route.version, after=route.version)
    read = [read_stamp(stamp, before.epoch) for stamp in stamps]
    known = [version for version in read if version is not None]
    if route.version_source is VersionSource.ENGINE and known:
        return PolicySpan(name=route.policy, before=known[0], after=known[-1])
    return PolicySpan(name=route.policy, before=before, after=after)


def read_stamp(stamp: str, epoch: int) -> PolicyVersion | None:
    """``7`` is version 7 of ``epoch``, ``2:7`` names its own epoch; None: anything else, a larger number included."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return None
    found = PolicyVersion(epoch if match[1] is None else int(match[1]), int(match[2]))
    return found if max(found) <= LARGEST_VERSION else None


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


@dataclass
class PolicyPauses:
    """Applies pauses to ``local``, and the versions that they bring to ``announced``."""

    local: PausedPolicies
    announced: AnnouncedVersions
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a pause was applied; cleared by the task that waits for it."""
    _newest: dict[str, PolicyPause] = field(default_factory=dict)

    def next(
        self,
        policy: str,
        mode: PauseMode | None,
        version: PolicyVersion | None = None,
        *,
        cache_reset: bool = False,
    ) -> PolicyPause:
        """A pause, or with mode None its end, that comes after all that are known here. It keeps the newest version."""
        before = self._newest.get(policy)
        number = 1 if before is None else before.number + 1
        version = version or (None if before is None else before.version)
        return PolicyPause(policy=policy, number=number, mode=mode, version=version, cache_reset=cache_reset)

    def apply(self, pause: PolicyPause) -> None:
        """Take in a pause, written here or by another replica. Of two with one number the later in the log counts."""
        before = self._newest.get(pause.policy)
        if before is not None and (pause.number < before.number or pause == before):
            return
        self._newest[pause.policy] = pause
        if pause.version is not None:
            self.announced.learn(pause.policy, pause.version)
        if pause.cache_reset:
            self.announced.caches_reset(pause.policy)
        if pause.mode is None:
            self.local.resume(pause.policy)
        else:
            self.local.pause(pause.policy, pause.mode)
        self.changed.set()

    def reached(self) -> dict[str, int]:
        """Policy to the number of its pause, where no call that the pause holds up is in flight."""
        return {policy: pause.number for policy, pause in self._newest.items() if not self._waits(pause)}

    def unreached(self) -> list[str]:
        """Policies with a pause that is not complete here."""
        return [policy for policy, pause in self._newest.items() if self._waits(pause)]

    def _waits(self, pause: PolicyPause) -> bool:
        return pause.mode is PauseMode.WAIT and bool(self.local.status(pause.policy)["in_flight"])
