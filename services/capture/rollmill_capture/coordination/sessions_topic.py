"""The topic ``sessions`` as it is read: entries of sessions, pauses of policies and heartbeats, each to its table."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmill.codec import Headers, header
from rollmill.models import PolicyPause, ReplicaHeartbeat, SessionEntry, SessionRecord, is_identifier, replica_key
from rollmill_capture.coordination.membership import Replicas
from rollmill_capture.coordination.policies import PolicyPauses
from rollmill_capture.coordination.session_table import SessionTable

ATTEMPT = "attempt"
"""Header of a tombstone: the attempt that it forgets."""


@dataclass(frozen=True)
class SessionsTopic:
    table: SessionTable
    pauses: PolicyPauses
    replicas: Replicas = field(default_factory=Replicas)

    def apply(self, _key: str, record: SessionRecord | None) -> None:
        """Take in a record."""
        match record:
            case SessionEntry():
                self.table.apply(record)
            case PolicyPause():
                self.pauses.apply(record)
            case ReplicaHeartbeat():
                self.replicas.apply(record)
            case None:
                """Tombstones come by ``forget``, with their headers."""

    def forget(self, key: str, headers: Headers) -> None:
        """Take in a tombstone."""
        if is_identifier(key):
            self.table.forget(key, forgotten_attempt(headers))
        elif key.startswith(replica_key("")):
            self.replicas.forget(key.removeprefix(replica_key("")))


def attempt_header(attempt: int) -> Headers:
    return ((ATTEMPT, str(attempt).encode()),)


def forgotten_attempt(headers: Headers) -> int | None:
    """The attempt that a tombstone forgets; None: whichever there is."""
    attempt = header(headers, ATTEMPT)
    return int(attempt) if attempt is not None and attempt.isdigit() else None
