"""When open sessions expire. A timer only asks: the session ends when its record is read back (RULES E2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rollmill.models import SessionExpired
from rollmill_builder.sessions import OpenSession, session_key

REPEAT_SECONDS = 30.0
"""A timer's record that came to nothing, since its transaction failed, is sent again after this."""


@dataclass(frozen=True)
class _Asked:
    seen: int
    at: float


class ExpiryTimer:
    """Finds sessions past their deadline or idle time, at most once in ``every`` seconds.

    What it remembers only avoids repeats, and gives sessions without event times a beginning; it may be lost.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._next = 0.0
        self._noticed: dict[str, float] = {}
        self._asked: dict[str, _Asked] = {}

    def due(self, sessions: Iterable[OpenSession], now: float) -> Iterator[SessionExpired]:
        if now < self._next:
            return
        self._next = now + self._every
        noticed, asked = self._noticed, self._asked
        self._noticed, self._asked = {}, {}
        for session in sessions:
            key = session_key(session.session_id, session.attempt)
            self._noticed[key] = noticed.get(key, now)
            reason = self._reason(session, self._noticed[key], now)
            if reason is not None:
                before = asked.get(key)
                self._asked[key] = (
                    before
                    if before is not None and _is_repeat(before, session, now)
                    else _Asked(len(session.calls), now)
                )
                if self._asked[key] is not before:
                    yield _expired(session, reason, now)

    @staticmethod
    def _reason(session: OpenSession, noticed: float, now: float) -> Literal["deadline", "idle"] | None:
        if now >= (session.opened_at or noticed) + session.spec.deadline_seconds:
            return "deadline"
        return "idle" if now >= (session.last_at or noticed) + session.spec.idle_seconds else None


def _is_repeat(before: _Asked, session: OpenSession, now: float) -> bool:
    return before.seen == len(session.calls) and now < before.at + REPEAT_SECONDS


def _expired(session: OpenSession, reason: Literal["deadline", "idle"], now: float) -> SessionExpired:
    return SessionExpired(
        session_id=session.session_id, attempt=session.attempt, reason=reason, seen=len(session.calls), at=now
    )
