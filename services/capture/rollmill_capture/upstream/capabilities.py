"""What is known of each engine, and what has to be asked of it, so that its answers have ids and log-probs.

| kind | ids in whole chat answers | in chat streams |
|---|---|---|
| `vllm` | yes | yes |
| `sglang` | yes | no: asked without streaming, and the stream is made for the client |
| `llama_cpp` | of the reply; the prompt's beside the call | the same, but not with tools |
| `openai` | no | no: recorded, never trained |

An engine is configured by the route, or found out by a probe in the background; a call that comes before the end of the
first probe waits for it for a moment. Where the probe finds nothing (an engine may refuse its request), the replies
show it; where they contradict what is known, another engine runs there now, and it is probed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.client import Target
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply
from rollmill_capture.upstream.formats.upstream_format import (
    CHAT,
    COMPLETIONS,
    SGLANG_GENERATE,
    VLLM_GENERATE,
    UpstreamFormat,
)

FIRST_PROBE_SECONDS = 2.0
DOUBT_AFTER = 3
"""Replies in a row that contradict what is known: one alone may be a parser's error, more are another engine."""

_VLLM = {"return_token_ids": True, "logprobs": True}
_SGLANG = {**_VLLM, "return_prompt_token_ids": True, "return_meta_info": True}
_CHAT: dict[EngineKind, dict[str, Any]] = {
    EngineKind.AUTO: _VLLM,
    EngineKind.VLLM: _VLLM,
    EngineKind.SGLANG: _SGLANG,
    EngineKind.LLAMA_CPP: {"logprobs": True},
    EngineKind.OPENAI: {},
}
_LOGPROBS = "logprobs"
"""Of completions: a number of alternatives, and any number that the client chose will do."""


@dataclass(frozen=True)
class Capability:
    """What is known of an engine."""

    kind: EngineKind = EngineKind.AUTO
    streams_ids: bool = True
    """False: its streams have no ids, and its whole answers have."""
    known: bool = False
    """True: configured, or found out by a probe."""
    ids: bool | None = None
    """Whether chat answers have all that training needs; None: not known yet."""

    def streams(self, upstream_format: UpstreamFormat, fields: dict[str, Any]) -> bool:
        """Whether a stream for the client is a stream of the engine."""
        if upstream_format is not CHAT:
            return True
        if self.kind is EngineKind.LLAMA_CPP and fields.get("tools"):
            return False
        return self.streams_ids and self.kind is not EngineKind.SGLANG


def request_token_ids(
    kind: EngineKind, upstream_format: UpstreamFormat, fields: dict[str, Any]
) -> tuple[dict[str, Any], list[str], bool]:
    """The fields with what capture needs, the names of those that it added, and whether it changed the client's own."""
    if upstream_format is CHAT:
        return _with_fields(fields, _CHAT[kind])
    if upstream_format is SGLANG_GENERATE:
        return _with_fields(fields, {"return_logprob": True})
    if upstream_format is VLLM_GENERATE:
        sampling = fields.get("sampling_params")
        inner, added, _ = _with_logprobs(sampling if isinstance(sampling, dict) else {})
        return {**fields, "sampling_params": inner}, [f"sampling_params.{name}" for name in added], False
    if upstream_format is COMPLETIONS and kind is not EngineKind.OPENAI:
        inner, added, changed = _with_logprobs(fields)
        served, more, overruled = _with_fields(inner, {"return_token_ids": True})
        return served, [*added, *more], changed or overruled
    return fields, [], False


def _with_fields(fields: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    added = [name for name in wanted if name not in fields]
    changed = any(name in fields and fields[name] is not value for name, value in wanted.items())
    return {**fields, **wanted}, added, changed


def _with_logprobs(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    if type(fields.get(_LOGPROBS)) is int:
        return dict(fields), [], False
    changed = _LOGPROBS in fields
    return {**fields, _LOGPROBS: 1}, [] if changed else [_LOGPROBS], changed


def has_all_ids(reply: ParsedReply, kind: EngineKind = EngineKind.AUTO) -> bool:
    """The reply has the ids of its prompt and of its first choice; llama.cpp's prompt is asked for beside the call."""
    choices = reply.choices
    if kind is EngineKind.LLAMA_CPP and any(choice.tokens for choice in choices):
        return True
    return bool(choices) and reply.prompt_ids is not None and choices[0].token_ids is not None


def after_reply(known: Capability, ids: bool, *, streamed: bool) -> Capability:
    """What is known after a reply, where nothing was known before. A stream without ids shows nothing about whole
    answers: those are tried next, and where they have none either, streams are as good.
    """
    if streamed and not ids:
        return replace(known, streams_ids=False)
    if ids:
        return replace(known, ids=True, known=True)
    return replace(known, ids=False, known=True, streams_ids=True)


def common_capability(found: Iterable[Capability]) -> Capability:
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


class EngineCapabilities:
    """Capabilities by the root of each replica. Without targets to probe, everything that is not configured is asked
    as vLLM is.
    """

    def __init__(self, probed: Iterable[Target] = (), *, wait_seconds: float = FIRST_PROBE_SECONDS) -> None:
        targets = [target for target in probed if target.route.engine is EngineKind.AUTO]
        self.probed = {root: target for target in targets for root in target.replicas}
        self._known: dict[str, Capability] = {}
        self._pending = {root: asyncio.Event() for root in self.probed}
        self._wait_seconds = wait_seconds
        self._contradictions: Counter[str] = Counter()
        """Replies in a row, by root, that contradict what is known."""
        self._doubted = {root: asyncio.Event() for root in self.probed}

    async def of(self, target: Target) -> Capability:
        """What is known by now of all replicas together; the first time, waited for."""
        if target.route.engine is not EngineKind.AUTO:
            return Capability(target.route.engine, known=True)
        if self._pending:
            for root in target.replicas:
                await self._wait_for_probe(root)
        if len(target.replicas) == 1:
            return self._known.get(target.root, Capability())
        return common_capability(self._known[root] for root in target.replicas if root in self._known)

    def learn(self, root: str, capability: Capability) -> None:
        self._known[root] = capability
        self.probe_ended(root)

    def probe_ended(self, root: str) -> None:
        """A probe is over, whatever it found: no call waits for it any more."""
        event = self._pending.pop(root, None)
        if event is not None:
            event.set()

    def observe(self, target: Target, upstream_format: UpstreamFormat, reply: ParsedReply, *, streamed: bool) -> None:
        """Take in a whole reply of an upstream that is not configured; where there are several replicas, it is not
        known which one it came from, and all are taken to be alike.
        """
        if upstream_format is not CHAT or target.route.engine is not EngineKind.AUTO or not reply.complete:
            return
        for root in target.replicas:
            known = self._known.get(root, Capability())
            ids = has_all_ids(reply, known.kind)
            if known.ids is None:
                self._known[root] = after_reply(known, ids, streamed=streamed)
            elif ids is known.ids:
                self._contradictions.pop(root, None)
            else:
                self._count_contradiction(root)

    async def wait_until_doubted(self, root: str) -> None:
        """Wait until the replies of a probed upstream contradict what is known of it."""
        await self._doubted[root].wait()
        self._doubted[root].clear()

    def _count_contradiction(self, root: str) -> None:
        """Another engine may answer there by now: it is probed again, or learnt anew where nothing is probed."""
        self._contradictions[root] += 1
        if self._contradictions[root] < DOUBT_AFTER:
            return
        del self._contradictions[root]
        if root in self._doubted:
            self._doubted[root].set()
        else:
            del self._known[root]

    async def _wait_for_probe(self, root: str) -> None:
        event = self._pending.get(root)
        if event is None:
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await event.wait()
        except TimeoutError:
            # An engine that is loading answers nothing for minutes: one such wait is enough for all calls.
            self.probe_ended(root)
