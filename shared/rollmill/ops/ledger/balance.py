"""The ledger's numbers: totals over everything, per policy version, and per length of session."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from heapq import nsmallest
from math import inf
from typing import Any

from rollmill.models import PolicyVersion

LENGTHS = (256, 1024, 4096, 16384, 65536)
"""Upper bounds of the length buckets, in sampled tokens of a session's attempt, inclusive."""
BUCKETS = (*(f"to_{bound}" for bound in LENGTHS), f"above_{LENGTHS[-1]}")


def bucket_of(tokens: int) -> str:
    """Name of the bucket that a session with so many captured tokens falls into."""
    return BUCKETS[bisect_left(LENGTHS, tokens)]


@dataclass
class Totals:
    """Numbers of sampled tokens. Every captured token is counted in exactly one of the five fates."""

    captured: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """By reason."""
    dead_lettered: Counter[str] = field(default_factory=Counter)
    """By reason."""
    pending: int = 0
    """Without a disposition, and in flight: beyond a stage's position, in its state, or in an unacknowledged step."""
    lost: int = 0
    """Without a disposition, and not in flight."""
    doubled: int = 0
    """Captured twice, or with two dispositions or two batch ids; counted in addition to the five fates."""
    uncaptured: int = 0
    """Given a disposition, but never captured; in no other number."""

    @property
    def balanced(self) -> bool:
        return not (self.lost or self.doubled or self.uncaptured)

    @property
    def accounted(self) -> int:
        """Sum of the five fates; equals ``captured``."""
        disposed = self.trained + self.excluded.total() + self.dead_lettered.total()
        return disposed + self.pending + self.lost

    def as_json(self) -> dict[str, Any]:
        return {
            "captured": self.captured,
            "trained": self.trained,
            "excluded": dict(sorted(self.excluded.items())),
            "dead_lettered": dict(sorted(self.dead_lettered.items())),
            "pending": self.pending,
            "lost": self.lost,
            "doubled": self.doubled,
            "uncaptured": self.uncaptured,
        }


@dataclass(frozen=True)
class PendingSession:
    """An attempt of a session with tokens that are pending."""

    session_id: str
    attempt: int
    tokens: int
    since: float
    """When the first of them was sampled, in seconds since the epoch."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Balance:
    """The ledger at one moment."""

    total: Totals = field(default_factory=Totals)
    by_version: dict[PolicyVersion, Totals] = field(default_factory=dict)
    by_length: dict[str, Totals] = field(default_factory=dict)
    """By bucket of `bucket_of` the session's captured tokens: shows a rule that drops long sessions."""
    sessions: Counter[str] = field(default_factory=Counter)
    """Attempts of sessions with captured tokens, by bucket."""
    unreadable: int = 0
    """Records of the topic ``outcomes`` that cannot be decoded; their tokens are in no number."""
    uncounted: int = 0
    """Records of ``completions`` that the builder has not read and the ledger cannot; their tokens are in no number."""
    _waiting: dict[tuple[str, int], PendingSession] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        return self.total.balanced and not self.unreadable

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self.total.pending and not self.uncounted

    @property
    def pending_since(self) -> float | None:
        """When the oldest pending token was sampled; None: nothing with a known time is pending."""
        return min((item.since for item in self._waiting.values() if item.since), default=None)

    def wait(self, session_id: str, attempt: int, tokens: int, since: float) -> None:
        """Note that so many tokens of a session are pending. ``since`` 0.0: unknown."""
        before = self._waiting.get((session_id, attempt), PendingSession(session_id, attempt, 0, since))
        first = min(filter(None, (before.since, since)), default=0.0)
        self._waiting[session_id, attempt] = PendingSession(session_id, attempt, before.tokens + tokens, first)

    def oldest(self, count: int) -> list[PendingSession]:
        """The sessions with tokens that have been pending for the longest time."""
        return nsmallest(count, self._waiting.values(), key=lambda item: (item.since or inf, item.session_id))

    def of(self, version: PolicyVersion, bucket: str) -> tuple[Totals, ...]:
        """The totals that a token of ``version`` in a session of that length counts in."""
        by_version = self.by_version.setdefault(version, Totals())
        return self.total, by_version, self.by_length.setdefault(bucket, Totals())

    def lengths(self) -> Iterator[tuple[str, int, Totals]]:
        """Bucket, sessions and totals, the shortest sessions first."""
        return ((name, self.sessions[name], self.by_length[name]) for name in BUCKETS if name in self.by_length)

    def as_json(self) -> dict[str, Any]:
        versions = {str(version): totals.as_json() for version, totals in sorted(self.by_version.items())}
        lengths = {name: {"sessions": count, **totals.as_json()} for name, count, totals in self.lengths()}
        state = {
            "unreadable": self.unreadable,
            "uncounted": self.uncounted,
            "pending_since": self.pending_since,
            "balanced": self.balanced,
        }
        return {**self.total.as_json(), **state, "by_version": versions, "by_length": lengths}
