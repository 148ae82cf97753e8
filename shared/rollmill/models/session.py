"""What capture replicas tell each other (topic ``sessions``, compacted): their sessions, pauses, and that they live."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rollmill.models.base import EventTime, Identifier, NonNegativeInt, PositiveInt, Record
from rollmill.models.specs import SessionSpec
from rollmill.models.versions import PolicyVersion

TENANT = "tenant"
"""Field of a session's metadata: the tenant that opened it. Not for clients to set where keys are needed."""


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
    tenant: str | None = None
    """The tenant that it belongs to; None: it was opened where no keys are required. Read from the spec's metadata, and
    written as a field of its own only where it is not there: release 0.1.0 refuses fields that it does not know."""

    @model_validator(mode="after")
    def _read_tenant(self) -> Self:
        recorded = self.spec.metadata.get(TENANT)
        if self.tenant is None and isinstance(recorded, str):
            object.__setattr__(self, "tenant", recorded)  # frozen for everybody else
        return self

    @model_serializer(mode="wrap")
    def _written_fields(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        if self.tenant in (None, self.spec.metadata.get(TENANT)):
            fields.pop("tenant", None)
        return fields

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


HEARTBEAT_SECONDS = 5.0
ALIVE_SECONDS = 3 * HEARTBEAT_SECONDS
"""Without a heartbeat for this long a replica is taken for dead."""


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
