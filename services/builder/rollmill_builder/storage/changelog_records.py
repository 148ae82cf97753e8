"""What the changelog holds of a session: how it opened, and each call by what it shares with earlier ones.

A delta refers to earlier deltas of its own key only. They are folded in the order of the input, by restore as well,
and end together (rule G1), so whatever a delta refers to is there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollmill.codec import CONTENT_TYPE, MSGPACK, decode
from rollmill.models import EventTime, Identifier, Record, SessionOpened
from rollmill_builder.storage.sequences import Shared

PACKED = ((CONTENT_TYPE, MSGPACK.encode()),)


class OpenedDelta(Record):
    kind: Literal["opened"] = "opened"
    session_id: Identifier
    attempt: int
    event: SessionOpened


class CallDelta(Record):
    """One accepted call."""

    kind: Literal["call"] = "call"
    session_id: Identifier
    attempt: int
    completion_id: Identifier
    digest: bytes
    """Of the record as received: the same id with another digest is a conflict (rule S1)."""
    started_at: EventTime
    ended_at: EventTime
    rest: bytes
    """The record without the sequences below."""
    prompt: Shared | None
    replies: tuple[bytes | None, ...]
    messages: Shared | None
    texts: tuple[bytes | None, ...]
    tools: bytes | None


Delta = Annotated[OpenedDelta | CallDelta, Field(discriminator="kind")]


def read_delta(payload: bytes) -> OpenedDelta | CallDelta:
    delta: OpenedDelta | CallDelta = decode(Delta, payload, PACKED)
    return delta


def read_packed(kind: Any, payload: bytes) -> Any:
    return decode(kind, payload, PACKED)
