"""When open sessions expire. A timer only asks: the session ends when its record is read back (rule E2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollmill.models import SessionExpired
from rollmill_builder.sessions.session_state import OpenSession, session_key

REPEAT_SECONDS = 30.0
"""A timer's record that came to nothing, since its transaction failed, is sent again after this."""

MANY_SESSIONS = 5_000
"""So many open sessions make the timer look half as often, twice as many a third as often: a look takes its time."""

Reason = Literal["deadline", "idle", "memory_budget"]


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a timer remembers of one session, by its own clock."""

    since: float
    """When the session was first looked at."""
    calls: int
    changed: float
    """When its number of calls was last seen to change."""
    asked: float | None = None
    """When its expiry was asked for, with this number of calls; None: not yet."""


class ExpiryTimer:
    """Finds sessions past their deadline or idle time. One for each task.

    It looks at most once in ``every`` seconds, and more seldom where there are many sessions.

    A session that is overdue when it is first looked at counts from that moment: its event times are missing, or are
    another clock's, or its calls are replayed. Idle counts from the last call's event time, and no earlier than that
    call was seen. What a timer remembers may be lost: then sessions live longer, never shorter.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._next = 0.0
        self._sights: dict[str, _Sight] = {}

    def rests(self, now: float) -> bool:
        """Whether it is too early to look again."""
        return now < self._next

    def due(self, sessions: Sequence[OpenSession], now: float, victims: Collection[str]) -> Iterator[SessionExpired]:
        self._next = now + self._every * (1 + len(sessions) // MANY_SESSIONS)
        before, self._sights = self._sights, {}
        for session in sessions:
            key = session_key(session.session_id, session.attempt)
            sight = _seen(before.get(key), session, now)
            reason = _reason(session, sight, now) or ("memory_budget" if key in victims else None)
            if reason is not None and (sight.asked is None or now >= sight.asked + REPEAT_SECONDS):
                sight = replace(sight, asked=now)
                yield _expired(session, reason, now)
            self._sights[key] = sight


def _seen(before: _Sight | None, session: OpenSession, now: float) -> _Sight:
    calls = len(session.calls)
    if before is None:
        return _Sight(now, calls, now)
    return before if before.calls == calls else _Sight(before.since, calls, now)


def _reason(session: OpenSession, sight: _Sight, now: float) -> Reason | None:
    limit = session.deadline_seconds
    overdue_at_sight = sight.since >= session.opened_at + limit
    if now >= (sight.since if overdue_at_sight else session.opened_at) + limit:
        return "deadline"
    return "idle" if now >= max(session.last_at, sight.changed) + session.idle_seconds else None


def _expired(session: OpenSession, reason: Reason, now: float) -> SessionExpired:
    return SessionExpired(
        session_id=session.session_id, attempt=session.attempt, reason=reason, seen=len(session.calls), at=now
    )
