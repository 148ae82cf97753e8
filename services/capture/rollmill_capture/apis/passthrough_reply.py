"""Answers in the engine's own format: passed on, without ids and log-probs that the client did not ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.strip_details import META_DETAILS, without_details, without_ids, without_logprobs
from rollmill_capture.upstream.formats.upstream_format import UpstreamFormat

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class RequestedDetails:
    """What the client itself asked for; the rest of what capture asks for is kept from it."""

    ids: bool = False
    logprobs: bool = False
    usage: bool = True


@dataclass(frozen=True)
class PassthroughFormatter:
    """The engine's own words. ``strip`` takes out what the client did not ask for; None: nothing is taken out."""

    wire: UpstreamFormat
    shape: ErrorFormat = OPENAI
    strip: Callable[[Any], Any] | None = None
    usage: bool = True
    """The client asked for the chunk that ends a stream with usage alone."""

    def voice(self) -> PassthroughStreamFormatter:
        return PassthroughStreamFormatter(self)

    def whole(self, raw: bytes, body: Any) -> bytes:
        return raw if self.strip is None else orjson.dumps(self.strip(body))


@dataclass(frozen=True)
class PassthroughStreamFormatter:
    answer: PassthroughFormatter

    def chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        if not self.answer.usage and _only_usage(chunk):
            return b""
        name = b"" if event.name == "message" else b"event: " + event.name.encode() + b"\n"
        if self.answer.strip is None:
            return name + b"data: " + event.data.replace(b"\n", b"\ndata: ") + b"\n\n"
        return name + b"data: " + orjson.dumps(self.answer.strip(chunk)) + b"\n\n"

    def end(self) -> bytes:
        return DONE if self.answer.wire.has_done else b""


def passthrough(wire: UpstreamFormat, wants: RequestedDetails) -> PassthroughFormatter:
    """The answer of a format with choices."""
    strips = {(False, False): without_details, (True, False): without_logprobs, (False, True): without_ids}
    return PassthroughFormatter(wire, strip=strips.get((wants.ids, wants.logprobs)), usage=wants.usage)


def without_meta(body: Any) -> Any:
    """SGLang's native answers without log-probs; the ids are their content. Changes ``body`` in place."""
    for part in body if isinstance(body, list) else (body,):
        meta = part.get("meta_info") if isinstance(part, dict) else None
        if isinstance(meta, dict):
            for name in META_DETAILS:
                meta.pop(name, None)
    return body


def _only_usage(chunk: dict[str, Any]) -> bool:
    """The chunk that ends a stream with usage alone: a client that did not ask for it may trip over it."""
    return not chunk.get("choices") and chunk.get("usage") is not None
