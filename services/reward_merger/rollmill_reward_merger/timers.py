"""Time as records (rule E2): a timer appends a final evaluation to its own partition, and reading it back counts.

``deadline``          stop waiting for the evaluators that have not answered
``revisions_closed``  take no more revisions: the trajectory goes, a marker stays
``forgotten``         the marker goes, or evaluations of a session that nothing was built of

The order of these records in the partition decides what is in time, so a replay needs no clock. Their ids are
deterministic: asking twice is asking once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from rollmill.models import Evaluation, dump_json
from rollmill.runtime.stream.processor import StateView, TaskLocal
from rollmill_reward_merger.revisions import complete_at
from rollmill_reward_merger.state import CLOSED_OF, EVALUATIONS_OF, Built, ClosedMarker, Held, PendingEvaluations

SCAN_SECONDS = 1.0
"""Least time between two looks at the whole state."""
REPEAT_SECONDS = 30.0
"""A timer whose record has not been read back is asked for again: its transaction may have failed."""


class Timer(StrEnum):
    DEADLINE = "deadline"
    REVISIONS_CLOSED = "revisions_closed"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Windows:
    """How long things are held, in seconds."""

    revisions: float
    """From the first merge: how long further evaluations make revisions."""
    markers: float
    """From then on: how long duplicates and late evaluations are recognised."""
    orphans: float
    """How long evaluations wait for a trajectory."""


@dataclass(frozen=True)
class Due:
    """A timer of one session; ``key`` is its state key ``<session>:<attempt>``, ``at`` the time that it is set to."""

    timer: Timer
    key: str
    digest: bytes
    at: float

    def record(self) -> Evaluation:
        """What the timer appends."""
        session_id, _, attempt = self.key.rpartition(":")
        content = dump_json([self.timer.value, session_id, int(attempt), self.digest.hex()])
        return Evaluation(
            evaluation_id=f"{self.timer.value}-{hashlib.blake2b(content, digest_size=12).hexdigest()}",
            session_id=session_id,
            attempt=int(attempt),
            evaluator=self.timer.value,
            not_graded=self.timer.value,
            final=True,
            at=self.at,
        )


def is_asked(evaluation: Evaluation, timer: Timer) -> bool:
    return evaluation.final and evaluation.not_graded == timer and evaluation.evaluator == timer


@dataclass(frozen=True)
class Watched:
    """One state key as it was last looked at: while both values are the same objects, its timer is the same."""

    seen: float
    """When it was seen first."""
    value: Held
    beside: Held | None
    """What decides with it: the evaluations of a trajectory, the trajectory of evaluations."""
    due: Due | None


@dataclass
class Watch(TaskLocal):
    """Finds what is due in one task's state.

    Remembers when it saw a key first (where no record tells the time) and what it has asked for. Neither is durable
    and nothing depends on them but when a timer fires and how often it repeats itself.
    """

    windows: Windows
    _scanned: float | None = None
    _watched: dict[str, Watched] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)

    def due(self, state: StateView[Held], now: float) -> list[Evaluation]:
        """Timer records to append now."""
        if self._scanned is not None and 0 <= now - self._scanned < SCAN_SECONDS:
            return []
        self._scanned = now
        self._watched = {key: self._look(state, key, value, now) for key, value in state.items()}
        found = [watched.due.record() for watched in self._watched.values() if watched.due and watched.due.at <= now]
        due = {record.evaluation_id: record for record in found}
        self._asked = {name: at for name, at in self._asked.items() if name in due and now - at < REPEAT_SECONDS}
        fresh = [record for name, record in due.items() if name not in self._asked]
        self._asked |= {record.evaluation_id: now for record in fresh}
        return fresh

    def _look(self, state: StateView[Held], key: str, value: Held, now: float) -> Watched:
        beside = state.get(
            key.removesuffix(EVALUATIONS_OF) if isinstance(value, PendingEvaluations) else key + EVALUATIONS_OF
        )
        before = self._watched.get(key)
        if before is not None and before.value is value and before.beside is beside:
            return before
        seen = now if before is None else before.seen
        return Watched(seen, value, beside, next_due(key, value, beside, seen, self.windows))


def next_due(key: str, value: Held, beside: Held | None, seen: float, windows: Windows) -> Due | None:
    """The timer of one state key, ``seen`` first at that time; None for evaluations of a known trajectory."""
    if isinstance(value, Built):
        return _of_built(
            key, value, beside.evaluations if isinstance(beside, PendingEvaluations) else (), seen, windows
        )
    if isinstance(value, ClosedMarker):
        at = _since(value.at, seen) + windows.markers
        return Due(Timer.FORGOTTEN, key.removesuffix(CLOSED_OF), value.digest, at)
    if beside is not None:
        return None
    return Due(Timer.FORGOTTEN, key.removesuffix(EVALUATIONS_OF), b"", seen + windows.orphans)


def _of_built(key: str, built: Built, said: tuple[Evaluation, ...], seen: float, windows: Windows) -> Due:
    merged = complete_at(built.trajectory, said)
    if merged is None:
        at = _since(built.trajectory.closed_at, seen) + built.trajectory.spec.evaluation_seconds
        return Due(Timer.DEADLINE, key, built.digest, at)
    return Due(Timer.REVISIONS_CLOSED, key, built.digest, _since(merged, seen) + windows.revisions)


def _since(at: float, seen: float) -> float:
    """Event time where a record tells a credible one (0.0 is none, the future is none), else the first sight."""
    return at if 0 < at < seen else seen


def answers_to(state: StateView[Held], key: str) -> tuple[Evaluation, ...]:
    """Everything said of the session under ``key``."""
    value = state.get(key + EVALUATIONS_OF)
    return value.evaluations if isinstance(value, PendingEvaluations) else ()
