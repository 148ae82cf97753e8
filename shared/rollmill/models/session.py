"""What capture replicas tell each other (topic ``sessions``, compacted): their sessions, pauses, and that they live."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from rollmill.models.base import EventTime, Identifier, NonNegativeInt, PositiveInt, Record
from rollmill.models.specs import SessionSpec
from rollmill.models.versions import PolicyVersion


class SessionState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class SessionEntry(Record):
    """A session, under its id."""

    session_id: Identifier
    attempt: PositiveInt = 1
    state: SessionState
    spec: SessionSpec
    opened_at: EventTime
    closed_at: EventTime | None = None
    """None: open."""
    token: str | None = None
    """SHA-256 (hex) of the session's API key; None where the session id is the key."""
    closing: str | None = None
    """SHA-256 (hex) of what the session was closed with, so that a repeated close can be recognised; None: open."""

    @model_validator(mode="before")
    @classmethod
    def _without_type(cls, data: object) -> object:
        """The other records of the topic have a type: one of a type that is not known here is no session."""
        if isinstance(data, dict) and "type" in data:
            raise ValueError(f"the type {str(data['type'])[:40]!r} is not known")
        return data


class PauseMode(StrEnum):
    """What becomes of the calls in flight: ``wait``: the pause is complete when they have ended; ``keep``: they go on
    while the weights change; ``abort_resume``: the engine aborts them, and they are continued with the new weights.
    """

    WAIT = "wait"
    KEEP = "keep"
    ABORT_RESUME = "abort_resume"


class PolicyPause(Record):
    """Whether new calls of a policy wait, at all replicas (rule A12). Its key is no session's."""

    type: Literal["policy_gate"] = "policy_gate"
    policy: Identifier
    number: PositiveInt
    """Counts the pauses and resumes of the policy; the highest one is valid."""
    mode: PauseMode | None
    """None: calls go on."""
    version: PolicyVersion | None = None
    """What the engines have loaded meanwhile; None: nothing new."""
    cache_reset: bool = False
    """The engines have dropped their prefix caches with the old weights."""

    @property
    def key(self) -> str:
        return f"!gate/{self.policy}"


class ReplicaHeartbeat(Record):
    """A sign of life of one replica. Its key is no session's."""

    type: Literal["replica"] = "replica"
    replica: Identifier
    at: EventTime
    reached: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Policy to the number of its newest pause that is complete at this replica: no call that it stops is in flight."""

    @property
    def key(self) -> str:
        return replica_key(self.replica)


def replica_key(replica: str) -> str:
    return f"!replica/{replica}"


SessionRecord = SessionEntry | PolicyPause | ReplicaHeartbeat
"""Any record of the topic ``sessions``."""
