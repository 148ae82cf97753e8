"""The request as served upstream. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill_capture.apis.api import ParsedRequest, ResponseFormatter
from rollmill_capture.json_body import compact_copy
from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.capabilities import Capability, request_token_ids
from rollmill_capture.upstream.formats.parsed_reply import Ids, as_prompt
from rollmill_capture.upstream.formats.upstream_format import CHAT, COMPLETIONS, UpstreamFormat

USAGE = "include_usage"
_UNKNOWN = Capability()


@dataclass(frozen=True)
class UpstreamRequest:
    body: bytes
    """The JSON body sent upstream."""
    original: bytes | None
    """The client's own; None where it is ``body`` without the ``added`` fields."""
    added: tuple[str, ...]
    """Names of the fields that capture added; they were absent."""
    fields: Mapping[str, Any]
    """What is sent upstream, as an object."""
    model: str | None
    """As the client said it."""
    wire: UpstreamFormat
    answer: ResponseFormatter
    stream: bool
    """The client reads a stream."""
    streams: bool
    """The engine is asked for one."""
    choices: int = 1
    prompt_ids: Ids | None = None
    """[p] int32, where the request gave the prompt as ids."""
    ignored: tuple[str, ...] = ()
    """Fields of the client that have no meaning for the engine."""
    kind: EngineKind = EngineKind.AUTO


def prepare(
    raw: bytes,
    asked: ParsedRequest,
    *,
    model: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    capability: Capability = _UNKNOWN,
) -> UpstreamRequest:
    """The request that goes upstream. ``model``: the upstream's name for it, where it has another; ``defaults``: fields
    that are said where the client does not say them.
    """
    fields, added, changed = request_token_ids(capability.kind, asked.upstream_format, asked.fields)
    for field, value in (defaults or {}).items():
        if fields.get(field) is None:
            added += [field] if field not in fields else []
            fields = {**fields, field: value}
    streams = asked.stream and capability.streams(asked.upstream_format, fields)
    if asked.stream:
        fields, changed = _streaming(asked, fields, added, changed, streams=streams)
    name = asked.fields.get("model")
    if model is not None and model != name:
        fields, changed = {**fields, "model": model}, True
    return UpstreamRequest(
        body=compact_copy(orjson.dumps(fields)),
        original=raw if changed or asked.translated else None,
        added=tuple(added),
        fields=fields,
        model=name if isinstance(name, str) else None,
        wire=asked.upstream_format,
        answer=asked.formatter,
        stream=asked.stream,
        streams=streams,
        choices=asked.choices,
        prompt_ids=_sent(asked, capability.kind),
        ignored=asked.ignored,
        kind=capability.kind,
    )


def _sent(asked: ParsedRequest, kind: EngineKind) -> Ids | None:
    """The prompt as the request gives it in ids; SGLang's chat takes them beside the messages."""
    if asked.upstream_format is CHAT and kind is EngineKind.SGLANG:
        return as_prompt(asked.fields.get("input_ids"))
    return asked.prompt_ids


def _streaming(
    asked: ParsedRequest, fields: dict[str, Any], added: list[str], changed: bool, *, streams: bool
) -> tuple[dict[str, Any], bool]:
    """Ask for usage at the end of a stream; or for no stream, where the engine's says no ids."""
    if not streams:
        return {**{name: value for name, value in fields.items() if name != "stream_options"}, "stream": False}, True
    options = fields.get("stream_options") or {}
    if asked.upstream_format not in (CHAT, COMPLETIONS) or options.get(USAGE) is True:
        return fields, changed
    if "stream_options" not in fields:
        added.append("stream_options")
    return {**fields, "stream_options": {**options, USAGE: True}}, changed or "stream_options" in fields
