"""Pauses that all replicas share: a gate per policy, written to the topic ``sessions`` and applied as it is read.

The gate with the highest number holds, so that nobody's clock decides and an echo of an older one changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollmill.models import PauseMode, PolicyPause, PolicyVersion
from rollmill_capture.coordination.policy_versions import AnnouncedVersions
from rollmill_capture.upstream.policy_pause import PausedPolicies


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
