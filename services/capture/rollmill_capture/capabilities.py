"""What is known of each upstream: which engine it is, and whether its answers and streams say ids.

Configured by the route, or found out by a probe in the background; a call that comes before the first probe's end waits
for it for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollmill_capture.engines.asking import Capability, EngineKind
from rollmill_capture.routes import Target

FIRST_PROBE_SECONDS = 2.0


class Engines:
    """Without targets to probe, everything that is not configured is asked as vLLM is."""

    def __init__(self, probed: Iterable[Target] = (), *, wait_seconds: float = FIRST_PROBE_SECONDS) -> None:
        self.probed = {target.base_url: target for target in probed if target.route.engine is EngineKind.AUTO}
        self._known: dict[str, Capability] = {}
        self._pending = {url: asyncio.Event() for url in self.probed}
        self._wait_seconds = wait_seconds

    async def of(self, target: Target) -> Capability:
        """What is known by now; the first time, waited for."""
        if target.route.engine is not EngineKind.AUTO:
            return Capability(target.route.engine, known=True)
        if target.base_url in self._pending:
            await self._first(target.base_url)
        return self._known.get(target.base_url, Capability())

    def learn(self, base_url: str, capability: Capability) -> None:
        self._known[base_url] = capability
        self.tried(base_url)

    def tried(self, base_url: str) -> None:
        """A probe is over, whatever it found: nobody waits for it any more."""
        event = self._pending.pop(base_url, None)
        if event is not None:
            event.set()

    async def _first(self, base_url: str) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._pending[base_url].wait()
        except TimeoutError:
            # An engine that is loading says nothing for minutes: one such wait is enough for all calls.
            self.tried(base_url)
