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

from rollmill.errors import BackpressureError
from rollmill.models import PauseMode, PolicyAnnouncement, PolicyPause, PolicySpan, PolicyVersion
from rollmill_capture.model_config import Route, VersionSource

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
        """The engines have loaded a version; an older one is no news."""
        known = self._newest.get(policy)
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
    """The versions of one call. ``stamps`` is the engine's word; ``before`` and ``after`` are the announced ones.

    An engine that says nothing readable is taken to run what was announced.
    """
    if route.version_source is VersionSource.FIXED:
        return PolicySpan(name=route.policy, before=route.version, after=route.version)
    read = [read_stamp(stamp, before.epoch) for stamp in stamps]
    known = [version for version in read if version is not None]
    if route.version_source is VersionSource.ENGINE and known:
        return PolicySpan(name=route.policy, before=known[0], after=known[-1])
    return PolicySpan(name=route.policy, before=before, after=after)


def read_stamp(stamp: str, epoch: int) -> PolicyVersion | None:
    """``7`` is version 7 of ``epoch``, ``2:7`` names its own epoch; None: anything else."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return None
    return PolicyVersion(epoch if match[1] is None else int(match[1]), int(match[2]))


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


class PausedPolicies:
    """One gate per policy. ``seconds`` bounds how long a call waits at a closed one."""

    def __init__(self, seconds: float = 900.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._gates: dict[str, _Gate] = {}

    @asynccontextmanager
    async def in_flight(self, policy: str) -> AsyncIterator[None]:
        """Inside, a call of the policy is in flight; entered only while the policy is not paused.

        Raises PausedTooLongError.
        """
        await self.wait_until_resumed(policy)
        gate = self._gate(policy)
        gate.running += 1
        gate.idle.clear()
        try:
            yield
        finally:
            gate.running -= 1
            if not gate.running:
                gate.idle.set()

    async def wait_until_resumed(self, policy: str) -> None:
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


@dataclass
class PolicyPauses:
    """Applies gates to ``pauses``, and the versions that they bring to ``announced``."""

    pauses: PausedPolicies
    announced: AnnouncedVersions
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a gate was applied; cleared by who waits for it."""
    _newest: dict[str, PolicyPause] = field(default_factory=dict)

    def next(
        self,
        policy: str,
        mode: PauseMode | None,
        version: PolicyVersion | None = None,
        *,
        cache_reset: bool = False,
    ) -> PolicyPause:
        """A gate that comes after all that are known here. The version of a resume stays known through later gates."""
        before = self._newest.get(policy)
        number = 1 if before is None else before.number + 1
        version = version or (None if before is None else before.version)
        return PolicyPause(policy=policy, number=number, mode=mode, version=version, cache_reset=cache_reset)

    def apply(self, gate: PolicyPause) -> None:
        """Take in a gate, written here or by another replica. Of two with one number the later in the log holds."""
        before = self._newest.get(gate.policy)
        if before is not None and (gate.number < before.number or gate == before):
            return
        self._newest[gate.policy] = gate
        if gate.version is not None:
            self.announced.learn(gate.policy, gate.version)
        if gate.cache_reset:
            self.announced.caches_reset(gate.policy)
        if gate.mode is None:
            self.pauses.resume(gate.policy)
        else:
            self.pauses.pause(gate.policy, gate.mode)
        self.changed.set()

    def reached(self) -> dict[str, int]:
        """Policy to the number of its gate, where no call that the gate holds up is in flight."""
        return {policy: gate.number for policy, gate in self._newest.items() if not self._waits(gate)}

    def unreached(self) -> list[str]:
        """Policies whose pause is not complete here."""
        return [policy for policy, gate in self._newest.items() if self._waits(gate)]

    def _waits(self, gate: PolicyPause) -> bool:
        return gate.mode is PauseMode.WAIT and bool(self.pauses.status(gate.policy)["in_flight"])
