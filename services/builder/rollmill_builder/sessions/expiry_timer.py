"""When open sessions expire. A timer only appends a record: the session ends when that is read back (rule E2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollmill.models import SessionExpired
from rollmill_builder.sessions.session_state import OpenSession, session_key

REPEAT_SECONDS = 30.0
"""A timer's record without effect, because its transaction failed, is sent again after this, and then each time after
twice as long: a session that cannot end must not fill the log."""
MOST_DOUBLINGS = 10

MANY_SESSIONS = 5_000
"""With this many open sessions the timer checks half as often, with twice as many a third as often: a check takes time
for each session."""

Reason = Literal["deadline", "idle", "memory_budget"]


@dataclass(frozen=True, slots=True)
class _Observation:
    """What a timer remembers of one session, by its own clock."""

    since: float
    """When the session was first checked."""
    calls: int
    changed: float
    """When its number of calls was last seen to change."""
    requested: float | None = None
    """When its expiry was last requested, with this number of calls; None: not yet."""
    requests: int = 0
    """How often that was."""

    def may_request(self, now: float) -> bool:
        pause = REPEAT_SECONDS * 2 ** min(self.requests - 1, MOST_DOUBLINGS)
        return self.requested is None or now >= self.requested + pause


class ExpiryTimer:
    """Finds sessions past their deadline or idle time. One for each task.

    It checks at most once in ``every`` seconds, and less often where there are many sessions.

    A session that is overdue when it is first checked counts from that moment: its event times are missing, or are
    another clock's, or its calls are replayed. Idle counts from the last call's event time, and no earlier than that
    call was seen. What a timer remembers may be lost: then sessions stay open longer, never shorter.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._next = 0.0
        self._observations: dict[str, _Observation] = {}

    def too_early(self, now: float) -> bool:
        """Whether the next check is not due yet."""
        return now < self._next

    def due(self, sessions: Sequence[OpenSession], now: float, excess: Collection[str]) -> Iterator[SessionExpired]:
        """The expiries to send. ``excess``: keys of the sessions that have to end because memory is short."""
        self._next = now + self._every * (1 + len(sessions) // MANY_SESSIONS)
        before, self._observations = self._observations, {}
        for session in sessions:
            key = session_key(session.session_id, session.attempt)
            observed = _observe(before.get(key), session, now)
            reason = _reason(session, observed, now) or ("memory_budget" if key in excess else None)
            if reason is not None and observed.may_request(now):
                observed = replace(observed, requested=now, requests=observed.requests + 1)
                yield _expired(session, reason, now)
            self._observations[key] = observed


def _observe(before: _Observation | None, session: OpenSession, now: float) -> _Observation:
    calls = len(session.calls)
    if before is None:
        return _Observation(now, calls, now)
    return before if before.calls == calls else _Observation(before.since, calls, now)


def _reason(session: OpenSession, observed: _Observation, now: float) -> Reason | None:
    limit = session.deadline_seconds
    overdue_at_first = observed.since >= session.opened_at + limit
    if now >= (observed.since if overdue_at_first else session.opened_at) + limit:
        return "deadline"
    return "idle" if now >= max(session.last_at, observed.changed) + session.idle_seconds else None


def _expired(session: OpenSession, reason: Reason, now: float) -> SessionExpired:
    return SessionExpired(
        session_id=session.session_id, attempt=session.attempt, reason=reason, seen=len(session.calls), at=now
    )
