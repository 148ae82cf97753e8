"""What the builder keeps of a session, in memory and in the changelog: its calls while it is open, a marker afterwards.

A `CallUpdate` refers to earlier updates of its own key only. They are applied in the order of the input, by restore as
well, and deleted together (rule G1), so whatever an update refers to is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from rollmill.codec import CONTENT_TYPE, MSGPACK, decode, encode
from rollmill.models import (
    CompletionRecord,
    CompletionSession,
    EventTime,
    Identifier,
    Record,
    SessionOpened,
    SessionSpec,
    SessionStatus,
)
from rollmill_builder.sessions.incremental_builder import IncrementalBuild
from rollmill_builder.storage.call_parts import HASH_BYTES, CallParts, id_hash, pack_rest
from rollmill_builder.storage.call_store import CallEntry, CallLog
from rollmill_builder.storage.sequence_store import SharedPrefix

CHANGELOG_HEADERS = ((CONTENT_TYPE, MSGPACK.encode()),)


class OpenedUpdate(Record):
    """How a session was opened."""

    kind: Literal["opened"] = "opened"
    session_id: Identifier
    attempt: int
    event: SessionOpened


class CallUpdate(Record):
    """One accepted call, by what it shares with earlier ones."""

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
    prompt: SharedPrefix | None
    replies: tuple[bytes | None, ...]
    messages: SharedPrefix | None
    texts: tuple[bytes | None, ...]
    tools: bytes | None


SessionUpdate = Annotated[OpenedUpdate | CallUpdate, Field(discriminator="kind")]


def read_update(payload: bytes) -> OpenedUpdate | CallUpdate:
    update: OpenedUpdate | CallUpdate = decode(SessionUpdate, payload, CHANGELOG_HEADERS)
    return update


def read_packed(kind: Any, payload: bytes) -> Any:
    return decode(kind, payload, CHANGELOG_HEADERS)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session was opened with: packed, since most of it is needed once, and there are many open sessions."""

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
    incremental: IncrementalBuild | None = field(default=None, compare=False)
    """What an incremental custom builder has made of the calls; None where the session's builder is not incremental."""

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
        return self.calls.full_record(number, self.session_id, self.attempt)

    def records(self) -> list[CompletionRecord]:
        return [self.record(number) for number in range(len(self.calls))]

    def call_update(self, record: CompletionRecord, parts: CallParts, digest: bytes) -> CallUpdate:
        """What the changelog has to hold of a further call. ``parts``, ``digest``: of the record."""
        prompt, messages = self.calls.own_store().content.share(parts)
        return CallUpdate(
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

    def updated(self, update: OpenedUpdate | CallUpdate) -> OpenSession:
        """The session with an update applied."""
        if isinstance(update, OpenedUpdate):
            opening = Opening.of(update.event)
            return replace(self, opening=opening, **self._times(opening.at, opening.at))
        entry = CallEntry(update.completion_id, update.digest, update.rest, update.tools)
        calls = self.calls.append(entry, update.prompt, update.messages, (update.replies, update.texts))
        return replace(self, calls=calls, **self._times(update.started_at or update.ended_at, update.ended_at))

    def _times(self, start: float, end: float) -> dict[str, Any]:
        known = [at for at in (self.first_at, start) if at]
        return {"first_at": min(known, default=0.0), "last_at": max(self.last_at, end)}

    def closed(self, at: float, status: SessionStatus, **end: Any) -> CompletionSession:
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
    """The latest event time that the session was seen with."""
    attempt: int
    digest: bytes
    """Of the trajectory that was sent."""
    known: bytes
    """8-byte hashes of the completion ids, one after the other."""

    def knows(self, completion_id: str) -> bool:
        wanted = id_hash(completion_id)
        return any(self.known[at : at + HASH_BYTES] == wanted for at in range(0, len(self.known), HASH_BYTES))

    def with_late(self, completion_id: str, at: float) -> ClosedMarker:
        """The marker with a late call of event time ``at``."""
        return self.model_copy(update={"known": self.known + id_hash(completion_id), "at": max(self.at, at)})


class MarkerSweep(Record):
    """When markers of closed sessions were last searched for expired ones, in event time."""

    at: EventTime


def session_key(session_id: str, attempt: int) -> str:
    return f"{session_id}:{attempt}"


def marker_key(key: str) -> str:
    return f"{key}/closed"
