"""What the ledger says: totals over everything and per policy version."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollmill.models import PolicyVersion


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
    """Without a disposition, and held: at or beyond a stage's position, in its state, or in an unacknowledged step."""
    lost: int = 0
    """Without a disposition, and held nowhere."""
    doubled: int = 0
    """Captured twice, or with two dispositions or two batch ids; counted beside the five fates."""
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


@dataclass
class Balance:
    """The ledger at one moment."""

    total: Totals = field(default_factory=Totals)
    by_version: dict[PolicyVersion, Totals] = field(default_factory=dict)
    unreadable: int = 0
    """Records of the topic ``outcomes`` that are none; their tokens are in no number."""

    @property
    def balanced(self) -> bool:
        return self.total.balanced and not self.unreadable

    def of(self, version: PolicyVersion) -> tuple[Totals, Totals]:
        """The two totals that a token of ``version`` counts in."""
        return self.total, self.by_version.setdefault(version, Totals())

    def as_json(self) -> dict[str, Any]:
        versions = {str(version): totals.as_json() for version, totals in sorted(self.by_version.items())}
        verdict = {"unreadable": self.unreadable, "balanced": self.balanced}
        return {**self.total.as_json(), **verdict, "by_version": versions}
