"""What is known of each upstream: which engine it is, and whether its answers and streams say ids.

Configured by the route, or found out by a probe in the background; a call that comes before the first probe's end waits
for it for a moment. Where the probe says nothing (an engine may refuse its question), the replies do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from rollmill_capture.engines.asking import Capability, EngineKind
from rollmill_capture.engines.reading import Reading
from rollmill_capture.engines.wires import CHAT, Wire
from rollmill_capture.routes import Target

FIRST_PROBE_SECONDS = 2.0


def says_all(reading: Reading) -> bool:
    """The reply has the ids of its prompt and of its first choice."""
    choices = reading.choices
    return bool(choices) and reading.prompt_ids is not None and choices[0].token_ids is not None


def seen(known: Capability, ids: bool, *, streamed: bool) -> Capability:
    """What is known after a reply, where nobody has looked before. A stream without ids says nothing of whole answers:
    those are tried next, and where they have none either, streams are as good.
    """
    if streamed and not ids:
        return replace(known, streams_ids=False)
    if ids:
        return replace(known, ids=True, known=True)
    return replace(known, ids=False, known=True, streams_ids=True)


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

    def observe(self, target: Target, wire: Wire, reading: Reading, *, streamed: bool) -> None:
        """Take in a whole reply of an upstream that is not configured."""
        if wire is not CHAT or target.route.engine is not EngineKind.AUTO or not reading.complete:
            return
        known = self._known.get(target.base_url, Capability())
        if known.ids is None:
            self._known[target.base_url] = seen(known, says_all(reading), streamed=streamed)

    async def _first(self, base_url: str) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._pending[base_url].wait()
        except TimeoutError:
            # An engine that is loading says nothing for minutes: one such wait is enough for all calls.
            self.tried(base_url)
