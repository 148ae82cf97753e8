"""What a replica keeps of a session that is closed: some hundred bytes, whatever its spec was (rule S3).

Closed sessions stay known for a day, and every replica holds all of them. Their specs are in the log.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rollmill.models import Purpose, SessionEntry, SessionSpec, SessionState
from rollmill.models.session import TENANT

_KEPT = ("task_id", "group_id", "group_size", "policy", "purpose", "deadline_seconds", "evaluation_seconds")


def spec_of_closed(spec: SessionSpec) -> SessionSpec:
    """What of a spec is needed once the session is closed: its group, its policy, its times, its tenant."""
    tenant = spec.metadata.get(TENANT)
    return SessionSpec(
        metadata={TENANT: tenant} if isinstance(tenant, str) else {}, **{name: getattr(spec, name) for name in _KEPT}
    )


@dataclass(frozen=True, slots=True)
class ClosedSession:
    """A closed session's `SessionEntry` in little memory."""

    session_id: str
    attempt: int
    opened_at: float
    closed_at: float | None
    token: str | None
    closing: bytes | None
    tenant: str | None
    tenant_in_metadata: bool
    task_id: str | None
    group_id: str | None
    group_size: int
    policy: str
    purpose: Purpose
    deadline_seconds: float
    evaluation_seconds: float

    @classmethod
    def of(cls, entry: SessionEntry) -> ClosedSession:
        spec = entry.spec
        return cls(
            session_id=entry.session_id,
            attempt=entry.attempt,
            opened_at=entry.opened_at,
            closed_at=entry.closed_at,
            token=entry.token,
            closing=None if entry.closing is None else bytes.fromhex(entry.closing),
            tenant=None if entry.tenant is None else sys.intern(entry.tenant),
            tenant_in_metadata=isinstance(spec.metadata.get(TENANT), str),
            task_id=spec.task_id,
            group_id=spec.group_id,
            group_size=spec.group_size,
            policy=sys.intern(spec.policy),
            purpose=spec.purpose,
            deadline_seconds=spec.deadline_seconds,
            evaluation_seconds=spec.evaluation_seconds,
        )

    def entry(self) -> SessionEntry:
        spec = SessionSpec(
            metadata={TENANT: self.tenant} if self.tenant_in_metadata else {},
            **{name: getattr(self, name) for name in _KEPT},
        )
        return SessionEntry(
            session_id=self.session_id,
            attempt=self.attempt,
            state=SessionState.CLOSED,
            spec=spec,
            opened_at=self.opened_at,
            closed_at=self.closed_at,
            token=self.token,
            closing=None if self.closing is None else self.closing.hex(),
            tenant=self.tenant,
        )
