"""A call and what became of it, as the record that the log keeps. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from rollmill.codec import MSGPACK, encode
from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    PolicyVersion,
    SampledChoice,
    SamplingParams,
    VersionRuns,
    total_length,
)
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policy_versions import version_span
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.upstream.client import Target
from rollmill_capture.upstream.formats.parsed_reply import LogProbs, ParsedChoice, ParsedReply, parser_failures
from rollmill_capture.upstream.formats.upstream_format import SGLANG_GENERATE, VLLM_GENERATE


@dataclass(frozen=True)
class Call:
    """One call of an agent, as it begins."""

    session_id: str
    attempt: int
    completion_id: str
    """Chosen before the upstream is called (rule S1)."""
    kind: CallKind
    target: Target
    served: UpstreamRequest
    started_at: float
    announced: PolicyVersion
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallResult:
    """What became of a call."""

    status: CallStatus
    reading: ParsedReply = field(default_factory=ParsedReply)
    http_status: int | None = None
    error: str | None = None
    response: bytes | None = None
    """The engine's answer without ids, as JSON; None for a stream."""
    versions: VersionRuns | None = None
    """Of the one choice of a reply in several parts; None: the call's own version."""
    metadata: dict[str, Any] = field(default_factory=dict)


def completion_record(call: Call, ending: CallResult, *, ended_at: float, announced: PolicyVersion) -> CompletionRecord:
    """The record of a call. ``announced`` is the newest announced version now, after the call."""
    reading, served = ending.reading, call.served
    return CompletionRecord(
        session_id=call.session_id,
        attempt=call.attempt,
        completion_id=call.completion_id,
        started_at=call.started_at,
        ended_at=ended_at,
        kind=call.kind,
        status=ending.status,
        http_status=ending.http_status,
        error=ending.error,
        model=reading.model or served.model,
        policy=version_span(call.target.route, reading.weight_versions, call.announced, announced),
        sampling=sampling_of(call),
        prompt_ids=reading.prompt_ids,
        choices=tuple(_choice(call, ending, choice) for choice in reading.choices),
        usage_completion_tokens=None if reading.usage is None else reading.usage[1],
        fingerprint=call.target.route.fingerprint,
        original_request=served.original,
        request=served.body,
        response=ending.response,
        metadata=_metadata(call, ending),
    )


def _metadata(call: Call, ending: CallResult) -> dict[str, Any]:
    served = call.served
    said = {"added_fields": list(served.added), "ignored_fields": list(served.ignored)}
    odd = dict.fromkeys(_oddities(call, ending), True)
    return {**call.metadata, **ending.metadata, **{name: names for name, names in said.items() if names}, **odd}


def _oddities(call: Call, ending: CallResult) -> list[str]:
    """Signs of a parser that failed; without tools there is none at work."""
    if not call.served.fields.get("tools") or ending.status is not CallStatus.OK:
        return []
    return [sign for choice in ending.reading.choices for sign in parser_failures(choice.message)]


def _choice(call: Call, ending: CallResult, choice: ParsedChoice) -> SampledChoice:
    why = _untrainable(call, ending, choice)
    return SampledChoice(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=_known_logprobs(choice),
        message=choice.message,
        versions=_versions(ending, choice),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        trainable=why is None,
        untrainable_reason=why,
    )


def _versions(ending: CallResult, choice: ParsedChoice) -> VersionRuns | None:
    versions = ending.versions
    return versions if versions is not None and total_length(versions) == choice.tokens else None


def _known_logprobs(choice: ParsedChoice) -> LogProbs | None:
    """Log-probs that are not one known number per id say nothing, also where there is no id at all."""
    found = choice.logprobs
    if found is None or choice.token_ids is None or len(found) != choice.tokens or np.isnan(found).any():
        return None
    return found


def _untrainable(call: Call, ending: CallResult, choice: ParsedChoice) -> str | None:
    if ending.status is CallStatus.CLIENT_GONE:
        return ending.status.value
    if not call.target.route.trainable:
        return "route_not_trainable"
    return ending.reading.untrainable_reason(choice)


def salted(served: UpstreamRequest, salt: str) -> UpstreamRequest:
    """The request with vLLM's ``cache_salt``, where it has none of its own."""
    body = orjson.loads(served.body)
    if "cache_salt" in body:
        return served
    return replace(served, body=orjson.dumps({**body, "cache_salt": salt}), added=(*served.added, "cache_salt"))


def sampling_of(call: Call) -> SamplingParams:
    """What decides the meaning of a log-prob, as far as the request says it; the engine's defaults are unknown."""
    fields = _sampling_fields(call.served)
    return SamplingParams(
        temperature=_number(fields.get("temperature"), low=0.0),
        top_p=_number(fields.get("top_p"), low=1e-9, high=1.0),
        top_k=_integer(fields.get("top_k")),
        logprobs_mode=call.target.route.logprobs_mode,
    )


def _sampling_fields(served: UpstreamRequest) -> Mapping[str, Any]:
    """Where a request says how to sample: the native routes have an object for it, and nobody else reads one."""
    inner = served.fields.get("sampling_params")
    return inner if served.wire in (SGLANG_GENERATE, VLLM_GENERATE) and isinstance(inner, dict) else served.fields


def _number(value: Any, *, low: float, high: float = 1e9) -> float | None:
    """A number inside its bounds; the engine is the one to complain of others."""
    return float(value) if type(value) in (int, float) and low <= value <= high else None


def _integer(value: Any) -> int | None:
    """Google's SDK says whole numbers as ``40.0``."""
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return int(value) if whole and abs(value) < MOST_INTEGER else None


def fitting_bytes(record: CompletionRecord, limit: int) -> bytes | None:
    """The encoded record, made to fit ``limit`` bytes (rule C1): first the client's own request goes, then the
    messages and the answer's body, last the reply's text; ids never. None: too large even so.
    """
    for smaller in _smaller(record):
        value = encode(smaller, MSGPACK)
        if len(value) <= limit:
            return value
    return None


def _smaller(record: CompletionRecord) -> Iterator[CompletionRecord]:
    yield record
    yield record.replace(original_request=None, metadata=_dropped(record, "original_request"))
    bare = record.replace(
        original_request=None,
        request=_without_messages(record.request),
        response=None,
        metadata=_dropped(record, "original_request", "request.messages", "response"),
    )
    yield bare
    yield bare.replace(
        choices=tuple(choice.replace(message=None) for choice in record.choices),
        metadata=_dropped(record, "original_request", "request.messages", "response", "choices.message"),
    )


MOST_INTEGER = 2**31
"""Of `top_k`: vocabularies are smaller, and no format of the record stumbles over it."""
TOKEN_BYTES = 64
"""Bound of what one sampled token takes in a record: id, log-prob and text."""
OVERHEAD_BYTES = 64 * 1024


def room_for(call: Call) -> int:
    """Most bytes that the record of a call may take. Both forms of the request may be kept, and its prompt's ids: four
    bytes for at most one token per byte. A reply without a limit may fill the record to its limit.
    """
    served = call.served
    limit = _limit(_sampling_fields(served))
    if limit is None:
        return COMPLETIONS.max_bytes
    asked = 5 * len(served.body) + len(served.original or b"")
    return min(COMPLETIONS.max_bytes, asked + limit * TOKEN_BYTES * served.choices + OVERHEAD_BYTES)


def _limit(fields: Mapping[str, Any]) -> int | None:
    """Most tokens that a request asks for; None: it does not say. A negative number would make room out of nothing."""
    said = (fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"))
    limit = next((limit for limit in said if limit), None)
    return max(limit, 0) if type(limit) is int else None


def _dropped(record: CompletionRecord, *names: str) -> dict[str, Any]:
    return {**record.metadata, "dropped_for_size": list(names)}


def _without_messages(request: bytes | None) -> bytes | None:
    if request is None:
        return None
    fields = orjson.loads(request)
    fields.pop("messages", None)
    fields.pop("tools", None)
    return orjson.dumps(fields)


def skeleton(record: CompletionRecord) -> CompletionRecord:
    """What is left of a record that cannot be made to fit: the call is counted, and nothing of it trained."""
    return CompletionRecord(
        session_id=record.session_id,
        attempt=record.attempt,
        completion_id=record.completion_id,
        started_at=record.started_at,
        ended_at=record.ended_at,
        kind=record.kind,
        status=CallStatus.INCOMPLETE,
        error="too_large",
        model=record.model,
        policy=record.policy,
        usage_completion_tokens=_sampled(record),
    )


def _sampled(record: CompletionRecord) -> int:
    known = sum(0 if choice.token_ids is None else len(choice.token_ids) for choice in record.choices)
    return max(known, record.usage_completion_tokens or 0)
