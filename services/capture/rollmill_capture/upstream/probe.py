"""Finds out in the background what an engine can: its list of models names it, one sampled token shows what it returns.

Never in the way: an engine that is not there yet is asked again, less and less often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import httpx
import orjson
import structlog

from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_capture.bodies import read_whole
from rollmill_capture.model_config import EngineKind
from rollmill_capture.sse import EventParser, ServerEvent
from rollmill_capture.upstream.capabilities import Capability, EngineCapabilities, has_all_ids, request_token_ids
from rollmill_capture.upstream.client import Target, upstream_error
from rollmill_capture.upstream.formats.chat_stream import ChatAssembler
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply
from rollmill_capture.upstream.formats.upstream_format import CHAT
from rollmill_capture.upstream.unusable import shown, unusable_answer

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
REPLY_BYTES = 4 * 2**20
AGAIN_SECONDS = 30.0
"""Between two probes of an engine that is known: replies of the one before may be under way that long."""


@dataclass(frozen=True)
class Probe:
    client: httpx.AsyncClient
    engines: EngineCapabilities
    metrics: Metrics
    note: Callable[[str, str | None], None] = lambda _about, _text: None
    """Shows what is wrong with an upstream, under its root; None: nothing is."""

    async def run(self) -> None:
        """Probe every replica of every upstream once with success. Cancel it at any time."""
        async with asyncio.TaskGroup() as group:
            for root, target in self.engines.probed.items():
                group.create_task(self._until_known(root, replace(target, base_url=f"{root}/v1", others=())))

    async def watch(self) -> None:
        """The same, and again whenever the replies contradict what was found. For ever; cancel it at any time."""
        async with asyncio.TaskGroup() as group:
            for root, target in self.engines.probed.items():
                group.create_task(self._watch(root, replace(target, base_url=f"{root}/v1", others=())))

    async def _watch(self, root: str, target: Target) -> None:
        while True:
            await self._until_known(root, target)
            await asyncio.sleep(AGAIN_SECONDS)
            await self.engines.wait_until_doubted(root)
            structlog.get_logger().warning(
                "an engine's replies contradict what was found of it; it is probed again", upstream=root
            )

    async def _until_known(self, root: str, target: Target) -> None:
        """``target``: this replica alone. One that is down is asked again until it comes up."""
        reported = ""
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                found = await self.probe(target)
            except (httpx.HTTPError, ValueError) as error:
                self.engines.probe_ended(root)
                fault = _fault(target, error)
                if fault != reported:
                    structlog.get_logger().warning(
                        "an upstream does not answer as a model server; it is asked again", upstream=root, error=fault
                    )
                reported = fault
                self.note(root, fault)
                await asyncio.sleep(pause)
            else:
                self.engines.learn(root, found)
                self.note(root, None)
                self._report(target, found)
                return

    async def probe(self, target: Target) -> Capability:
        """What the engine is and can. Raises httpx.HTTPError and ValueError where it does not answer."""
        kind, model = await self._identify(target)
        streams = Capability(kind).streams(CHAT, {})
        stream = await self._sample(target, kind, model, stream=True) if streams else None
        if stream is not None and has_all_ids(stream, kind):
            return Capability(kind, known=True, ids=True)
        whole = await self._sample(target, kind, model, stream=False)
        if whole is None:
            return Capability(kind, known=True)
        ids = has_all_ids(whole, kind)
        return Capability(kind, streams_ids=not ids, known=True, ids=ids)

    async def _identify(self, target: Target) -> tuple[EngineKind, str | None]:
        response = await self._ask("GET", f"{target.base_url}/models", headers=_headers(target))
        try:
            body = orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            if response.is_server_error:
                response.raise_for_status()
            raise ValueError(unusable_answer(str(response.request.url), response.content)) from error
        response.raise_for_status()
        data = body.get("data") if isinstance(body, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        model = target.route.model or first.get("id")
        return OWNERS.get(str(first.get("owned_by")).lower(), EngineKind.AUTO), model or None

    async def _sample(self, target: Target, kind: EngineKind, model: str | None, *, stream: bool) -> ParsedReply | None:
        """One token; None where the engine refuses the request, which shows nothing about others."""
        named: dict[str, Any] = {**QUESTION, "stream": stream} | ({} if model is None else {"model": model})
        fields, _, _ = request_token_ids(kind, CHAT, named)
        url = f"{target.base_url}/chat/completions"
        response = await self._ask("POST", url, json=fields, headers=_headers(target))
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            response.raise_for_status()
        if response.status_code != httpx.codes.OK:
            return None
        return _parse_stream(response.content) if stream else CHAT.parse_body(orjson.loads(response.content), None)

    async def _ask(self, method: str, url: str, **request: Any) -> httpx.Response:
        async with self.client.stream(method, url, timeout=CALL_SECONDS, **request) as response:
            content = await read_whole(response, REPLY_BYTES)
            return httpx.Response(response.status_code, content=content, request=response.request)

    def _report(self, target: Target, found: Capability) -> None:
        log = structlog.get_logger()
        fields = {"upstream": target.base_url, "engine": found.kind.value, "ids": found.ids}
        if found.ids is not None:  # an engine that refuses the question shows it by its first reply
            self.metrics.gauge("engine_ids", float(found.ids), upstream=target.base_url, engine=found.kind.value)
        if found.ids is False:
            log.warning("the engine's answers have no ids: its calls are recorded, and not trained", **fields)
        else:
            log.info("the engine was probed", streams_ids=found.streams_ids, **fields)


def _parse_stream(raw: bytes) -> ParsedReply:
    assembler = ChatAssembler()
    for event in EventParser().feed(raw):
        if isinstance(event, ServerEvent) and event.data.strip() != b"[DONE]":
            assembler.add(orjson.loads(event.data))
    return assembler.parsed()


def _fault(target: Target, error: httpx.HTTPError | ValueError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status, content = error.response.status_code, error.response.content
        return f"{error.request.url} answered {status}: {shown(content)}"
    return str(upstream_error(error, target)) if isinstance(error, httpx.HTTPError) else str(error)


def _headers(target: Target) -> dict[str, str]:
    return {} if target.authorization is None else {"authorization": target.authorization}
