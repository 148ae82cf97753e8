"""The request as it is sent upstream, and how the reply to it is sampled and how large it may become. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import orjson

from rollmill.models import SamplingParams
from rollmill.topics import COMPLETIONS as COMPLETIONS_TOPIC
from rollmill_capture.apis.api import ParsedRequest, ResponseFormatter
from rollmill_capture.apis.openai import PassthroughFormatter, without_details
from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.capabilities import Capability, request_token_ids
from rollmill_capture.upstream.formats.parsed_reply import Ids, as_prompt
from rollmill_capture.upstream.formats.upstream_format import (
    CHAT,
    COMPLETIONS,
    SGLANG_GENERATE,
    VLLM_GENERATE,
    UpstreamFormat,
)

USAGE = "include_usage"
CACHE_SALT = "cache_salt"
MOST_INTEGER = 2**31
"""Of `top_k`: vocabularies are smaller, and no format of the record stumbles over it."""
TOKEN_BYTES = 64
"""Bound of what one sampled token takes in a record: id, log-prob and text."""
OVERHEAD_BYTES = 64 * 1024
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
    """The client's name of it."""
    upstream_format: UpstreamFormat
    formatter: ResponseFormatter
    client_streams: bool
    """The client reads a stream."""
    engine_streams: bool
    """The engine is asked for one."""
    choices: int = 1
    prompt_ids: Ids | None = None
    """[p] int32, where the request gave the prompt as ids."""
    ignored: tuple[str, ...] = ()
    """Fields of the client that have no meaning for the engine."""
    engine: EngineKind = EngineKind.AUTO

    def with_cache_salt(self, salt: str) -> Self:
        """The request with vLLM's ``cache_salt``, where it has none of its own."""
        body = orjson.loads(self.body)
        if CACHE_SALT in body:
            return self
        return replace(self, body=orjson.dumps({**body, CACHE_SALT: salt}), added=(*self.added, CACHE_SALT))

    def sampling_params(self, logprobs_mode: Literal["raw", "processed"] | None = None) -> SamplingParams:
        """What decides the meaning of a log-prob, as far as the request names it; the engine's defaults are unknown."""
        fields = self._sampling_fields
        return SamplingParams(
            temperature=_number(fields.get("temperature"), low=0.0),
            top_p=_number(fields.get("top_p"), low=1e-9, high=1.0),
            top_k=_integer(fields.get("top_k")),
            logprobs_mode=logprobs_mode,
        )

    @property
    def record_bytes(self) -> int:
        """Most bytes that the record of the call may take. Both forms of the request may be kept, and its prompt's ids:
        four bytes for at most one token per byte. A reply without a limit may fill the record to its limit.
        """
        limit = _token_limit(self._sampling_fields)
        if limit is None:
            return COMPLETIONS_TOPIC.max_bytes
        request = 5 * len(self.body) + len(self.original or b"")
        return min(COMPLETIONS_TOPIC.max_bytes, request + limit * TOKEN_BYTES * self.choices + OVERHEAD_BYTES)

    @property
    def strips_details(self) -> bool:
        """The client's whole answer is the engine's without ids and log-probs: just what the record keeps of it."""
        formatter = self.formatter
        stripped = isinstance(formatter, PassthroughFormatter) and formatter.strip is without_details
        return stripped and not self.client_streams

    @property
    def _sampling_fields(self) -> Mapping[str, Any]:
        """Where the request says how to sample: the native routes have an object for it, other routes read none."""
        inner = self.fields.get("sampling_params")
        return (
            inner
            if self.upstream_format in (SGLANG_GENERATE, VLLM_GENERATE) and isinstance(inner, dict)
            else self.fields
        )


def prepare(
    raw: bytes,
    parsed: ParsedRequest,
    *,
    model: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    capability: Capability = _UNKNOWN,
) -> UpstreamRequest:
    """The request that goes upstream. ``model``: the upstream's name for it, where it has another; ``defaults``: fields
    that are added where the client's request lacks them.
    """
    fields, added, changed = request_token_ids(capability.kind, parsed.upstream_format, parsed.fields)
    for field, value in (defaults or {}).items():
        if fields.get(field) is None:
            added += [field] if field not in fields else []
            fields = {**fields, field: value}
    engine_streams = parsed.stream and capability.streams(parsed.upstream_format, fields)
    if parsed.stream:
        fields, changed = _stream_options(parsed, fields, added, changed, engine_streams=engine_streams)
    name = parsed.fields.get("model")
    if model is not None and model != name:
        fields, changed = {**fields, "model": model}, True
    return UpstreamRequest(
        # A compact copy, for it is kept as long as the call: what orjson returns holds on to several times the text.
        body=bytes(memoryview(orjson.dumps(fields))),
        original=raw if changed or parsed.translated else None,
        added=tuple(added),
        fields=fields,
        model=name if isinstance(name, str) else None,
        upstream_format=parsed.upstream_format,
        formatter=parsed.formatter,
        client_streams=parsed.stream,
        engine_streams=engine_streams,
        choices=parsed.choices,
        prompt_ids=_given_prompt_ids(parsed, capability.kind),
        ignored=parsed.ignored,
        engine=capability.kind,
    )


def _given_prompt_ids(parsed: ParsedRequest, engine: EngineKind) -> Ids | None:
    """The prompt as the request gives it in ids; SGLang's chat takes them beside the messages."""
    if parsed.upstream_format is CHAT and engine is EngineKind.SGLANG:
        return as_prompt(parsed.fields.get("input_ids"))
    return parsed.prompt_ids


def _stream_options(
    parsed: ParsedRequest, fields: dict[str, Any], added: list[str], changed: bool, *, engine_streams: bool
) -> tuple[dict[str, Any], bool]:
    """Ask for usage at the end of a stream; or for no stream, where the engine's has no ids."""
    if not engine_streams:
        return {**{name: value for name, value in fields.items() if name != "stream_options"}, "stream": False}, True
    options = fields.get("stream_options") or {}
    if parsed.upstream_format not in (CHAT, COMPLETIONS) or options.get(USAGE) is True:
        return fields, changed
    if "stream_options" not in fields:
        added.append("stream_options")
    return {**fields, "stream_options": {**options, USAGE: True}}, changed or "stream_options" in fields


def _number(value: Any, *, low: float, high: float = 1e9) -> float | None:
    """A number inside its bounds; the engine is the one to complain of others."""
    return float(value) if type(value) in (int, float) and low <= value <= high else None


def _integer(value: Any) -> int | None:
    """Google's SDK writes whole numbers as ``40.0``."""
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return int(value) if whole and abs(value) < MOST_INTEGER else None


def _token_limit(fields: Mapping[str, Any]) -> int | None:
    """Most tokens that a request asks for; None: it sets no limit. A negative number would make room out of nothing."""
    limits = (fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"))
    limit = next((limit for limit in limits if limit), None)
    return max(limit, 0) if type(limit) is int else None
