"""What is known of each upstream: which engine it is, and whether its answers and streams say ids.

Configured by the route, or found out by a probe in the background; a call that comes before the first probe's end waits
for it for a moment. Where the probe says nothing (an engine may refuse its question), the replies do; where they speak
against what is known, another engine has taken the place, and it is probed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply
from rollmill_capture.upstream.formats.token_id_request import Capability
from rollmill_capture.upstream.formats.upstream_format import CHAT, UpstreamFormat
from rollmill_capture.upstream.model_routes import Target

FIRST_PROBE_SECONDS = 2.0
DOUBT_AFTER = 3
"""Replies in a row that speak against what is known: one alone may be a parser's slip, more are another engine."""


def says_all(reading: ParsedReply, kind: EngineKind = EngineKind.AUTO) -> bool:
    """The reply has the ids of its prompt and of its first choice; llama.cpp's prompt is asked for beside the call."""
    choices = reading.choices
    if kind is EngineKind.LLAMA_CPP and any(choice.tokens for choice in choices):
        return True
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


def weakest(found: Iterable[Capability]) -> Capability:
    """What can be asked of any of some replicas: a call may go to each of them. Without any: nothing is known."""
    known = list(found)
    if not known:
        return Capability()
    kinds = {capability.kind for capability in known}
    ids = {capability.ids for capability in known}
    return Capability(
        kind=kinds.pop() if len(kinds) == 1 else EngineKind.AUTO,
        streams_ids=all(capability.streams_ids for capability in known),
        known=all(capability.known for capability in known),
        ids=ids.pop() if len(ids) == 1 else None if False not in ids else False,
    )


class Engines:
    """Known by the root of each replica. Without targets to probe, everything that is not configured is asked as vLLM
    is.
    """

    def __init__(self, probed: Iterable[Target] = (), *, wait_seconds: float = FIRST_PROBE_SECONDS) -> None:
        targets = [target for target in probed if target.route.engine is EngineKind.AUTO]
        self.probed = {root: target for target in targets for root in target.replicas}
        self._known: dict[str, Capability] = {}
        self._pending = {root: asyncio.Event() for root in self.probed}
        self._wait_seconds = wait_seconds
        self._odd: Counter[str] = Counter()
        """Replies in a row, by root, that speak against what is known."""
        self._doubted = {root: asyncio.Event() for root in self.probed}

    async def of(self, target: Target) -> Capability:
        """What is known by now of all replicas together; the first time, waited for."""
        if target.route.engine is not EngineKind.AUTO:
            return Capability(target.route.engine, known=True)
        if self._pending:
            for root in target.replicas:
                await self._first(root)
        if len(target.replicas) == 1:
            return self._known.get(target.root, Capability())
        return weakest(self._known[root] for root in target.replicas if root in self._known)

    def learn(self, root: str, capability: Capability) -> None:
        self._known[root] = capability
        self.tried(root)

    def tried(self, root: str) -> None:
        """A probe is over, whatever it found: nobody waits for it any more."""
        event = self._pending.pop(root, None)
        if event is not None:
            event.set()

    def observe(self, target: Target, wire: UpstreamFormat, reading: ParsedReply, *, streamed: bool) -> None:
        """Take in a whole reply of an upstream that is not configured; where there are several replicas, it is not
        known which one it came from, and all are taken to be alike.
        """
        if wire is not CHAT or target.route.engine is not EngineKind.AUTO or not reading.complete:
            return
        for root in target.replicas:
            known = self._known.get(root, Capability())
            ids = says_all(reading, known.kind)
            if known.ids is None:
                self._known[root] = seen(known, ids, streamed=streamed)
            elif ids is known.ids:
                self._odd.pop(root, None)
            else:
                self._wonder(root)

    async def doubted(self, root: str) -> None:
        """Wait until the replies of a probed upstream speak against what is known of it."""
        await self._doubted[root].wait()
        self._doubted[root].clear()

    def _wonder(self, root: str) -> None:
        """Another engine may answer there by now: it is probed again, or learnt anew where nothing is probed."""
        self._odd[root] += 1
        if self._odd[root] < DOUBT_AFTER:
            return
        del self._odd[root]
        if root in self._doubted:
            self._doubted[root].set()
        else:
            del self._known[root]

    async def _first(self, root: str) -> None:
        event = self._pending.get(root)
        if event is None:
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await event.wait()
        except TimeoutError:
            # An engine that is loading says nothing for minutes: one such wait is enough for all calls.
            self.tried(root)
