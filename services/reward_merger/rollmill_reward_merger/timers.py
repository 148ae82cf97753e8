"""Time as records (rule E2): a timer appends a final evaluation to its own partition, and takes effect when it is read.

``deadline``          stop waiting for the evaluators that have not answered
``revisions_closed``  take no more revisions: the trajectory is deleted, a marker stays
``forgotten``         delete the marker, or evaluations of a session that nothing was built of

The order of these records in the partition decides what is in time, so a replay needs no clock. Their ids are
deterministic: a record that is appended twice counts once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from rollmill.models import Evaluation, dump_json
from rollmill.runtime.stream.processor import StateView, TaskLocal
from rollmill_reward_merger.revisions import first_merge_at
from rollmill_reward_merger.state import (
    CLOSED_SUFFIX,
    EVALUATIONS_SUFFIX,
    Built,
    ClosedMarker,
    PendingEvaluations,
    StateValue,
    pending_evaluations,
)

SCAN_SECONDS = 1.0
"""Least time between two passes over the whole state."""
REPEAT_SECONDS = 30.0
"""A timer's record is appended again if it was not read by then: its transaction may have failed."""


class Timer(StrEnum):
    DEADLINE = "deadline"
    REVISIONS_CLOSED = "revisions_closed"
    EXPIRED = "forgotten"


@dataclass(frozen=True)
class Windows:
    """How long values are kept, in seconds."""

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


def is_record_of(timer: Timer, evaluation: Evaluation) -> bool:
    return evaluation.final and evaluation.not_graded == timer and evaluation.evaluator == timer


@dataclass(frozen=True)
class KeyTimer:
    """The timer of one state key, which stays the same while ``value`` and ``related`` are the same objects."""

    seen: float
    """When the key was first seen."""
    value: StateValue
    related: StateValue | None
    """What the timer depends on besides: the evaluations of a trajectory, the trajectory of evaluations."""
    due: Due | None


@dataclass
class TimerScheduler(TaskLocal):
    """Finds the timers that are due in one task's state.

    Remembers when it first saw a key (for records without an event time) and which records it has appended. Neither is
    durable; they only affect when a timer fires and how often its record is repeated.
    """

    windows: Windows
    _scanned: float | None = None
    _timers: dict[str, KeyTimer] = field(default_factory=dict)
    _appended: dict[str, float] = field(default_factory=dict)
    """Time of each record that is not known to be read, by evaluation id."""

    def due_records(self, state: StateView[StateValue], now: float) -> list[Evaluation]:
        """Timer records to append now."""
        if self._scanned is not None and 0 <= now - self._scanned < SCAN_SECONDS:
            return []
        self._scanned = now
        self._timers = {key: self._timer(state, key, value, now) for key, value in state.items()}
        records = [timer.due.record() for timer in self._timers.values() if timer.due and timer.due.at <= now]
        due = {record.evaluation_id: record for record in records}
        self._appended = {name: at for name, at in self._appended.items() if name in due and now - at < REPEAT_SECONDS}
        fresh = [record for name, record in due.items() if name not in self._appended]
        self._appended |= {record.evaluation_id: now for record in fresh}
        return fresh

    def _timer(self, state: StateView[StateValue], key: str, value: StateValue, now: float) -> KeyTimer:
        is_pending = isinstance(value, PendingEvaluations)
        related = state.get(key.removesuffix(EVALUATIONS_SUFFIX) if is_pending else key + EVALUATIONS_SUFFIX)
        before = self._timers.get(key)
        if before is not None and before.value is value and before.related is related:
            return before
        seen = now if before is None else before.seen
        return KeyTimer(seen, value, related, next_due(key, value, related, seen, self.windows))


def next_due(key: str, value: StateValue, related: StateValue | None, seen: float, windows: Windows) -> Due | None:
    """The timer of a state key that was first ``seen`` at that time; None for evaluations of a known trajectory."""
    if isinstance(value, Built):
        return _due_of_built(key, value, pending_evaluations(related), seen, windows)
    if isinstance(value, ClosedMarker):
        at = _since(value.at, seen) + windows.markers
        return Due(Timer.EXPIRED, key.removesuffix(CLOSED_SUFFIX), value.digest, at)
    if related is not None:
        return None
    return Due(Timer.EXPIRED, key.removesuffix(EVALUATIONS_SUFFIX), b"", seen + windows.orphans)


def _due_of_built(key: str, built: Built, evaluations: tuple[Evaluation, ...], seen: float, windows: Windows) -> Due:
    merged = first_merge_at(built.trajectory, evaluations)
    if merged is None:
        at = _since(built.trajectory.closed_at, seen) + built.trajectory.spec.evaluation_seconds
        return Due(Timer.DEADLINE, key, built.digest, at)
    return Due(Timer.REVISIONS_CLOSED, key, built.digest, _since(merged, seen) + windows.revisions)


def _since(at: float, seen: float) -> float:
    """The event time where it is credible (neither 0.0, which means unknown, nor in the future), else ``seen``."""
    return at if 0 < at < seen else seen
