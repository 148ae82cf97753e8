"""The record by which capture replicas know a session (topic ``sessions``, compacted)."""

from __future__ import annotations

from enum import StrEnum

from rollmill.models.base import EventTime, Identifier, PositiveInt, Record
from rollmill.models.specs import SessionSpec


class SessionState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class SessionEntry(Record):
    session_id: Identifier
    attempt: PositiveInt = 1
    state: SessionState
    spec: SessionSpec
    opened_at: EventTime
    token: str | None = None
    """SHA-256 (hex) of the session's API key; None where the session id is the key."""
    closing: str | None = None
    """SHA-256 (hex) of what the session was closed with, so that a repeated close is told from another; None: open."""
