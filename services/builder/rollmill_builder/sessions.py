"""What the builder keeps of a session: an open session's calls, and a marker of a closed one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from rollmill.errors import PoisonRecordError
from rollmill.models import (
    CompletionEvent,
    CompletionRecord,
    CompletionSession,
    EventTime,
    Record,
    SampledChoice,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    dump_json,
)
from rollmill_builder.messages import parse_object

HASH_BYTES = 8


class Held(Record):
    """One delta: an event, reduced to what the builder needs, and the digest of the whole."""

    digest: bytes
    event: CompletionEvent


@dataclass(frozen=True)
class Accepted:
    """One call in an open session."""

    record: CompletionRecord
    digest: bytes
    """Of the record as received: the same id with another digest is a conflict (RULES S1)."""


class CallLog:
    """The accepted calls, in order of acceptance: immutable by its interface, appended to in constant time.

    Logs share one list; each sees its own length of it. Appending to a log that is not the newest one copies.
    """

    __slots__ = ("_entries", "_length", "_places")

    def __init__(self, entries: list[Accepted] | None = None, places: dict[str, int] | None = None) -> None:
        self._entries = entries if entries is not None else []
        self._places = places if places is not None else {}
        self._length = len(self._entries)

    def append(self, entry: Accepted) -> CallLog:
        entries, places = self._entries, self._places
        if len(entries) != self._length:
            entries = entries[: self._length]
            places = {item.record.completion_id: place for place, item in enumerate(entries)}
        places[entry.record.completion_id] = len(entries)
        entries.append(entry)
        return CallLog(entries, places)

    def find(self, completion_id: str) -> Accepted | None:
        place = self._places.get(completion_id, self._length)
        if place >= self._length:
            return None
        return self._entries[place]

    def __iter__(self) -> Iterator[Accepted]:
        return iter(self._entries[: self._length])

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallLog) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # records have no hash


@dataclass(frozen=True)
class OpenSession:
    """An open (session, attempt). A call before ``session_opened`` opens it with defaults (RULES S2)."""

    session_id: str
    attempt: int
    opened: SessionOpened | None = None
    """None: only calls were seen yet."""
    first_at: float = 0.0
    """Event time of the first record; 0.0: unknown."""
    last_at: float = 0.0
    calls: CallLog = field(default_factory=CallLog)

    @property
    def spec(self) -> SessionSpec:
        return SessionSpec() if self.opened is None else self.opened.spec

    @property
    def opened_at(self) -> float:
        return self.first_at if self.opened is None or not self.opened.at else self.opened.at

    def take(self, held: Held) -> OpenSession:
        event = held.event
        if isinstance(event, SessionOpened):
            return replace(self, opened=event, **self._times(event.at, event.at))
        if isinstance(event, CompletionRecord):
            calls = self.calls.append(Accepted(event, held.digest))
            return replace(self, calls=calls, **self._times(event.started_at or event.ended_at, event.ended_at))
        raise ValueError(f"{event.type} is no state of a session")

    def _times(self, began: float, ended: float) -> dict[str, Any]:
        return {"first_at": self.first_at or began, "last_at": max(self.last_at, ended)}

    def closed(self, at: float, status: SessionStatus, **end: Any) -> CompletionSession:
        """The session with its end, as builders get it."""
        return CompletionSession(
            session_id=self.session_id,
            attempt=self.attempt,
            spec=self.spec,
            opened_at=self.opened_at,
            closed_at=at or self.last_at,
            status=status,
            completions=tuple(item.record for item in self.calls),
            **end,
        )


class Closed(Record):
    """Marker of a closed (session, attempt): the same call again is a duplicate, a new one is late (RULES S2)."""

    at: EventTime
    attempt: int
    digest: bytes
    """Of the trajectory that was sent."""
    known: bytes
    """8-byte hashes of the completion ids, one after the other."""

    def knows(self, completion_id: str) -> bool:
        mark = id_hash(completion_id)
        return any(self.known[at : at + HASH_BYTES] == mark for at in range(0, len(self.known), HASH_BYTES))

    def with_late(self, completion_id: str) -> Closed:
        return self.model_copy(update={"known": self.known + id_hash(completion_id)})


class Sweep(Record):
    """When markers were last looked through, in event time."""

    at: EventTime


def session_key(session_id: str, attempt: int) -> str:
    return f"{session_id}:{attempt}"


def marker_key(key: str) -> str:
    return f"{key}/closed"


def id_hash(completion_id: str) -> bytes:
    return hashlib.blake2b(completion_id.encode(), digest_size=HASH_BYTES).digest()


def content_digest(record: Record) -> bytes:
    """Digest of a record's content, however it was encoded. Raises PoisonRecordError ``invalid``."""
    try:
        return hashlib.blake2b(_canonical(record), digest_size=16).digest()
    except (TypeError, ValueError) as error:
        raise PoisonRecordError("invalid", f"the record holds what JSON cannot say: {error}") from error


def _canonical(value: Any) -> bytes:
    if isinstance(value, Record):
        return b"".join(_framed(name.encode(), _canonical(item)) for name, item in value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, bytes):
        return dump_json(orjson.loads(value))
    if isinstance(value, tuple):
        return b"".join(_framed(b"", _canonical(item)) for item in value)
    return dump_json(value)


def _framed(name: bytes, content: bytes) -> bytes:
    return b"%s %d:%s" % (name, len(content), content)


def reduced(record: CompletionRecord) -> CompletionRecord:
    """A call without what no trace shows: of the request only messages and tools stay, of the response the replies."""
    request = parse_object(record.request)
    kept = {name: request[name] for name in ("messages", "tools") if name in request} if request else None
    choices = tuple(_with_message(choice, record.response) for choice in record.choices)
    update = {"original_request": None, "request": dump_json(kept) if kept else None, "response": None}
    return record.model_copy(update={**update, "choices": choices})


def _with_message(choice: SampledChoice, response: bytes | None) -> SampledChoice:
    """The reply's message from the response body where the choice itself has none."""
    if choice.message is not None or response is None:
        return choice
    found = (parse_object(response) or {}).get("choices")
    items = found if isinstance(found, list) else []
    messages = [
        item.get("message") for item in items if isinstance(item, dict) and item.get("index", 0) == choice.index
    ]
    message = next((item for item in messages if isinstance(item, dict)), None)
    return choice if message is None else choice.model_copy(update={"message": dump_json(message)})
