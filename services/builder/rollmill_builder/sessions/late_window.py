"""How long closed sessions are remembered, and what is refused once one may be forgotten (rule S2). Pure.

A marker goes at a *sweep*, and its time tells how far the memory reaches back: the horizon is the sweep's time less the
window. A marker keeps the latest event time that its session was seen with, so a record from before the horizon may
belong to a session that was forgotten, and one from after it does not. Such an old record is refused only where it
would open a session: what is known decides alone. Time is the log's, as the ends of sessions have it. However long a
backlog waited, it is read in the order in which it was written, and the horizon behind it has not moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmill.codec import ADMIT_OLD, Headers, encode, header
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, SessionClosed, SessionOpened
from rollmill.runtime.stream.processor import StateUpdate, StateView
from rollmill_builder.sessions.session_state import ClosedMarker, MarkerSweep, OpenSession

SWEEP_KEY = "sweep"
SWEEPS_PER_WINDOW = 8

Sweep = tuple[tuple[str, ...], tuple[StateUpdate, ...]]
"""Keys of the forgotten markers, and the update of the sweep's time."""


@dataclass(frozen=True)
class LateWindow:
    """``seconds`` of event time for which a closed session is remembered."""

    seconds: float

    def refuse_forgotten(self, state: StateView[Any], event: object, headers: Headers) -> None:
        """For an event of a session that is not known. Raises PoisonRecordError ``too_old``.

        A record without an event time cannot be judged, and is taken. So is one that an operator has admitted.
        """
        at, horizon = event_time(event), self._horizon(state)
        if not 0.0 < at < horizon or header(headers, ADMIT_OLD) is not None:
            return
        raise PoisonRecordError(
            "too_old",
            f"its time {at:.3f} is {horizon - at:.0f} s before what is remembered of ended sessions, so it may have "
            "been processed before. Where it surely was not, `rollmill dlq replay --admit-old` admits it; otherwise "
            "drop it",
            units_held=True,
        )

    def sweep(self, state: StateView[Any], ended_at: float, clock: float | None) -> Sweep:
        """At the end of a session, a few times per window.

        One record moves the time by at most a window, and never beyond ``clock``, the builder's own (None: not known
        yet, so nothing is forgotten): a wrong clock of one writer neither expires all markers nor makes the
        records of all others too old.
        """
        before = last_sweep(state)
        now = 0.0 if clock is None else min(ended_at, clock)
        if before:
            if now < before + self.seconds / SWEEPS_PER_WINDOW:
                return (), ()
            now = min(now, before + self.seconds)
        if not now:
            return (), ()
        update = StateUpdate(SWEEP_KEY, encode(MarkerSweep(at=now)), replaces=True)
        return tuple(_expired_markers(state, now - self.seconds)), (update,)

    def _horizon(self, state: StateView[Any]) -> float:
        return last_sweep(state) - self.seconds


def event_time(event: object) -> float:
    """The latest time of an event that can open a session; 0.0: none."""
    if isinstance(event, CompletionRecord):
        return max(event.started_at, event.ended_at)
    return event.at if isinstance(event, (SessionOpened, SessionClosed)) else 0.0


def last_sweep(state: StateView[Any]) -> float:
    """Event time of the last sweep; 0.0: none yet, so nothing was forgotten."""
    sweep = state.get(SWEEP_KEY)
    return sweep.at if isinstance(sweep, MarkerSweep) else 0.0


def seen_until(state: StateView[Any], session: OpenSession, closed_at: float) -> float:
    """The time of a session's marker: no earlier than any record of it, nor than the time at which it was closed."""
    return max(closed_at, session.last_at, last_sweep(state))


def _expired_markers(state: StateView[Any], before: float) -> Iterator[str]:
    return (key for key, value in state.items() if isinstance(value, ClosedMarker) and value.at < before)
