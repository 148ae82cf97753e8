"""What the builder keeps of a session: an open session's calls, and a marker of a closed one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.codec import encode
from rollmill.models import (
    CompletionRecord,
    CompletionSession,
    EventTime,
    Record,
    SessionOpened,
    SessionSpec,
    SessionStatus,
)
from rollmill_builder.sessions.incremental_builder import Folded
from rollmill_builder.storage.call_parts import Parts, pack_rest
from rollmill_builder.storage.call_store import CallLog
from rollmill_builder.storage.changelog_records import CallDelta, OpenedDelta, read_packed
from rollmill_builder.storage.digests import HASH_BYTES, id_hash


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session asked for: packed, since most of it is needed once, and there are many open sessions."""

    packed: bytes
    at: float
    deadline_seconds: float
    idle_seconds: float

    @classmethod
    def of(cls, event: SessionOpened) -> Opening:
        return cls(encode(event.spec), event.at, event.spec.deadline_seconds, event.spec.idle_seconds)

    @property
    def spec(self) -> SessionSpec:
        spec: SessionSpec = read_packed(SessionSpec, self.packed)
        return spec


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An open (session, attempt). A call before ``session_opened`` opens it with defaults (rule S2)."""

    session_id: str
    attempt: int
    opening: Opening | None = None
    """None: only calls were seen yet."""
    first_at: float = 0.0
    """Earliest event time of a record, whatever came first; 0.0: unknown."""
    last_at: float = 0.0
    calls: CallLog = field(default_factory=CallLog)
    folded: Folded | None = field(default=None, compare=False)
    """What an incremental custom builder has made of the calls; None where the builder is none."""

    @property
    def spec(self) -> SessionSpec:
        return SessionSpec() if self.opening is None else self.opening.spec

    @property
    def opened_at(self) -> float:
        return self.first_at if self.opening is None or not self.opening.at else self.opening.at

    @property
    def deadline_seconds(self) -> float:
        return SessionSpec().deadline_seconds if self.opening is None else self.opening.deadline_seconds

    @property
    def idle_seconds(self) -> float:
        return SessionSpec().idle_seconds if self.opening is None else self.opening.idle_seconds

    def record(self, number: int) -> CompletionRecord:
        """A call, in order of acceptance, with its prompt."""
        return self.calls.whole(number, self.session_id, self.attempt)

    def records(self) -> list[CompletionRecord]:
        return [self.record(number) for number in range(len(self.calls))]

    def delta(self, record: CompletionRecord, parts: Parts, digest: bytes) -> CallDelta:
        """What the changelog has to hold of a further call. ``parts``, ``digest``: of the record."""
        prompt, messages = self.calls.share(parts)
        return CallDelta(
            session_id=self.session_id,
            attempt=self.attempt,
            completion_id=record.completion_id,
            digest=digest,
            started_at=record.started_at,
            ended_at=record.ended_at,
            rest=pack_rest(record),
            prompt=prompt,
            replies=parts.replies,
            messages=messages,
            texts=parts.texts,
            tools=parts.tools,
        )

    def take(self, delta: OpenedDelta | CallDelta) -> OpenSession:
        """The session with a delta folded in."""
        if isinstance(delta, OpenedDelta):
            opening = Opening.of(delta.event)
            return replace(self, opening=opening, **self._times(opening.at, opening.at))
        times = self._times(delta.started_at or delta.ended_at, delta.ended_at)
        return replace(self, calls=self.calls.append(delta), **times)

    def _times(self, began: float, ended: float) -> dict[str, Any]:
        known = [at for at in (self.first_at, began) if at]
        return {"first_at": min(known, default=0.0), "last_at": max(self.last_at, ended)}

    def ended(self, at: float, status: SessionStatus, **end: Any) -> CompletionSession:
        """The session with its end, without its calls."""
        return CompletionSession(
            session_id=self.session_id,
            attempt=self.attempt,
            spec=self.spec,
            opened_at=self.opened_at,
            closed_at=at or self.last_at,
            status=status,
            **end,
        )


class ClosedMarker(Record):
    """Marker of a closed (session, attempt): the same call again is a duplicate, a new one is late (rule S2)."""

    at: EventTime
    attempt: int
    digest: bytes
    """Of the trajectory that was sent."""
    known: bytes
    """8-byte hashes of the completion ids, one after the other."""

    def knows(self, completion_id: str) -> bool:
        mark = id_hash(completion_id)
        return any(self.known[at : at + HASH_BYTES] == mark for at in range(0, len(self.known), HASH_BYTES))

    def with_late(self, completion_id: str) -> ClosedMarker:
        return self.model_copy(update={"known": self.known + id_hash(completion_id)})


class Sweep(Record):
    """When markers were last looked through, in event time."""

    at: EventTime


def session_key(session_id: str, attempt: int) -> str:
    return f"{session_id}:{attempt}"


def marker_key(key: str) -> str:
    return f"{key}/closed"
