"""Records that are too large for the log: what is left out, in which order, so that they fit (rule C1). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from rollmill.codec import MSGPACK, encode
from rollmill.models import CallStatus, CompletionRecord


def fitting_bytes(record: CompletionRecord, limit: int) -> bytes | None:
    """The encoded record, made to fit ``limit`` bytes: first the client's own request goes, then the messages and the
    answer's body, last the reply's text; ids never. None: too large even so.
    """
    for smaller in _smaller(record):
        value = encode(smaller, MSGPACK)
        if len(value) <= limit:
            return value
    return None


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
        usage_completion_tokens=_sampled_tokens(record),
    )


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


def _dropped(record: CompletionRecord, *names: str) -> dict[str, Any]:
    return {**record.metadata, "dropped_for_size": list(names)}


def _without_messages(request: bytes | None) -> bytes | None:
    if request is None:
        return None
    fields = orjson.loads(request)
    fields.pop("messages", None)
    fields.pop("tools", None)
    return orjson.dumps(fields)


def _sampled_tokens(record: CompletionRecord) -> int:
    known = sum(0 if choice.token_ids is None else len(choice.token_ids) for choice in record.choices)
    return max(known, record.usage_completion_tokens or 0)
