"""Finds out in the background what an engine can: its list of models says who it is, one sampled token what it says.

Never in the way: an engine that is not there yet is asked again, less and less often.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import httpx
import orjson
import structlog

from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_capture.model_config import EngineKind
from rollmill_capture.sse import EventParser, ServerEvent
from rollmill_capture.upstream.capabilities import Engines, says_all
from rollmill_capture.upstream.formats.chat_stream import ChatAssembler
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply
from rollmill_capture.upstream.formats.token_id_request import Capability, ask
from rollmill_capture.upstream.formats.upstream_format import CHAT
from rollmill_capture.upstream.model_routes import Target

OWNERS = {
    "vllm": EngineKind.VLLM,
    "sglang": EngineKind.SGLANG,
    "llamacpp": EngineKind.LLAMA_CPP,
    "llama.cpp": EngineKind.LLAMA_CPP,
}
"""``owned_by`` in an engine's list of models."""
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 1.0}
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)
CALL_SECONDS = 60.0
AGAIN_SECONDS = 30.0
"""Between two probes of an engine that is known: replies of the one before may be under way that long."""


@dataclass(frozen=True)
class Probe:
    client: httpx.AsyncClient
    engines: Engines
    metrics: Metrics

    async def run(self) -> None:
        """Probe every replica of every upstream once with success. Cancel it at any time."""
        async with asyncio.TaskGroup() as group:
            for root, target in self.engines.probed.items():
                group.create_task(self._until_known(root, replace(target, base_url=f"{root}/v1", others=())))

    async def watch(self) -> None:
        """The same, and again whenever the replies speak against what was found. For ever; cancel it at any time."""
        async with asyncio.TaskGroup() as group:
            for root, target in self.engines.probed.items():
                group.create_task(self._watch(root, replace(target, base_url=f"{root}/v1", others=())))

    async def _watch(self, root: str, target: Target) -> None:
        while True:
            await self._until_known(root, target)
            await asyncio.sleep(AGAIN_SECONDS)
            await self.engines.doubted(root)
            structlog.get_logger().warning(
                "an engine answers otherwise than it did, and is probed again", upstream=root
            )

    async def _until_known(self, root: str, target: Target) -> None:
        """``target``: this replica alone. One that is down is asked again until it comes up."""
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                found = await self.look(target)
            except (httpx.HTTPError, ValueError) as error:
                self.engines.tried(root)
                structlog.get_logger().debug("an engine was not probed", upstream=root, error=repr(error))
                await asyncio.sleep(pause)
            else:
                self.engines.learn(root, found)
                self._tell(target, found)
                return

    async def look(self, target: Target) -> Capability:
        """What the engine is and can. Raises httpx.HTTPError and ValueError where it does not answer."""
        kind, model = await self._who(target)
        streams = Capability(kind).streams(CHAT, {})
        stream = await self._sample(target, kind, model, stream=True) if streams else None
        if stream is not None and says_all(stream, kind):
            return Capability(kind, known=True, ids=True)
        whole = await self._sample(target, kind, model, stream=False)
        if whole is None:
            return Capability(kind, known=True)
        ids = says_all(whole, kind)
        return Capability(kind, streams_ids=not ids, known=True, ids=ids)

    async def _who(self, target: Target) -> tuple[EngineKind, str | None]:
        answer = await self.client.get(f"{target.base_url}/models", headers=_headers(target), timeout=CALL_SECONDS)
        answer.raise_for_status()
        body = orjson.loads(answer.content)
        data = body.get("data") if isinstance(body, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        model = target.route.model or first.get("id")
        return OWNERS.get(str(first.get("owned_by")).lower(), EngineKind.AUTO), model or None

    async def _sample(self, target: Target, kind: EngineKind, model: str | None, *, stream: bool) -> ParsedReply | None:
        """One token; None where the engine refuses the question, which says nothing about others."""
        named: dict[str, Any] = {**QUESTION, "stream": stream} | ({} if model is None else {"model": model})
        fields, _, _ = ask(kind, CHAT, named)
        answer = await self.client.post(
            f"{target.base_url}/chat/completions", json=fields, headers=_headers(target), timeout=CALL_SECONDS
        )
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            answer.raise_for_status()
        if answer.status_code != httpx.codes.OK:
            return None
        return _streamed(answer.content) if stream else CHAT.read_body(orjson.loads(answer.content), None)

    def _tell(self, target: Target, found: Capability) -> None:
        log = structlog.get_logger()
        told = {"upstream": target.base_url, "engine": found.kind.value, "ids": found.ids}
        self.metrics.gauge("engine_ids", float(found.ids is True), upstream=target.base_url, engine=found.kind.value)
        if found.ids is False:
            log.warning("the engine's answers say no ids: its calls are recorded, and not trained", **told)
        else:
            log.info("the engine was probed", streams_ids=found.streams_ids, **told)


def _streamed(raw: bytes) -> ParsedReply:
    assembler = ChatAssembler()
    for event in EventParser().feed(raw):
        if isinstance(event, ServerEvent) and event.data.strip() != b"[DONE]":
            assembler.add(orjson.loads(event.data))
    return assembler.reading()


def _headers(target: Target) -> dict[str, str]:
    return {} if target.authorization is None else {"authorization": target.authorization}
