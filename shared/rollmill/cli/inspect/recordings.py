"""Sessions folded from their events as the builder's stage does it: what it accepts, ignores and refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rollmill.models import (
    CompletionEvent,
    CompletionRecord,
    CompletionSession,
    SessionClosed,
    SessionExpired,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    Trajectory,
)

SessionAttempt = tuple[str, int]
"""Session id and attempt."""


@dataclass(frozen=True)
class Recording:
    """One (session, attempt), as far as its events are known."""

    session_id: str
    attempt: int
    opened: SessionOpened | None = None
    calls: tuple[CompletionRecord, ...] = ()
    """Accepted before the end."""
    end: SessionClosed | SessionExpired | None = None
    """None: the session is open."""
    late: tuple[CompletionRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """What was ignored or refused."""
    built: Trajectory | None = None
    """The builder's trajectory; None where it was not found."""

    @property
    def spec(self) -> SessionSpec:
        return SessionSpec() if self.opened is None else self.opened.spec

    def session(self) -> CompletionSession:
        """As a builder gets it; an open session as if it ended now."""
        starts = [call.started_at for call in self.calls if call.started_at]
        ends = [call.ended_at for call in self.calls]
        opened_at = self.opened.at if self.opened is not None else 0.0
        closed_at = 0.0 if self.end is None else self.end.at
        session = CompletionSession(
            session_id=self.session_id,
            attempt=self.attempt,
            spec=self.spec,
            opened_at=opened_at or min(starts, default=0.0),
            closed_at=closed_at or max(ends, default=0.0),
            completions=self.calls,
        )
        return session.model_copy(update=_ending(self.end))


def _ending(end: SessionClosed | SessionExpired | None) -> dict[str, object]:
    if isinstance(end, SessionExpired):
        return {"status": SessionStatus.TIMEOUT, "error": f"session expired: {end.reason}"}
    if end is None:
        return {}
    return {"status": end.status, "error": end.error, "output": end.output, "reward": end.reward}


@dataclass
class Recordings:
    """Takes events in the order of the topic; `recordings` are in the order in which sessions appeared."""

    _found: dict[SessionAttempt, Recording] = field(default_factory=dict)

    def take(self, event: CompletionEvent) -> None:
        key = event.session_id, event.attempt
        self._found[key] = _taken(self._found.get(key) or Recording(*key), event)

    def built(self, trajectory: Trajectory) -> None:
        key = trajectory.session_id, trajectory.attempt
        self._found[key] = replace(self._found.get(key) or Recording(*key), built=trajectory)

    @property
    def recordings(self) -> tuple[Recording, ...]:
        return tuple(self._found.values())


def folded(events: Iterable[CompletionEvent]) -> tuple[Recording, ...]:
    recorded = Recordings()
    for event in events:
        recorded.take(event)
    return recorded.recordings


def _taken(before: Recording, event: CompletionEvent) -> Recording:
    if isinstance(event, CompletionRecord):
        return _called(before, event)
    if isinstance(event, SessionOpened):
        return _opened(before, event)
    if before.end is not None:
        return _with_note(before, f"{event.type} came after the end and is ignored")
    if isinstance(event, SessionExpired) and event.reason == "idle" and len(before.calls) > event.seen:
        return _with_note(before, f"an idle timer that had seen {event.seen} calls is ignored")
    return replace(before, end=event)


def _opened(before: Recording, event: SessionOpened) -> Recording:
    if before.opened is None and before.end is None:
        return replace(before, opened=event)
    if before.opened == event:
        return _with_note(before, "session_opened came more than once")
    return _with_note(before, "another session_opened is refused")


def _called(before: Recording, record: CompletionRecord) -> Recording:
    known = next((call for call in (*before.calls, *before.late) if call.completion_id == record.completion_id), None)
    if known is not None:
        note = "came more than once" if known == record else "came again with another content: refused (conflict)"
        return _with_note(before, f"{record.completion_id} {note}")
    if before.end is not None:
        return replace(before, late=(*before.late, record))
    return replace(before, calls=(*before.calls, record))


def _with_note(before: Recording, note: str) -> Recording:
    return replace(before, notes=(*before.notes, note))
