"""How old a sampled token is when its step will be trained, and what follows from it (RULES B3, A4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollmill.models import PolicyVersion, Trace, staleness

UNANNOUNCED = PolicyVersion()
"""Version of tokens without a label: the oldest that there is."""


class StalenessAction(StrEnum):
    """What happens to a trace beyond the limit."""

    DROP = "drop"


@dataclass(frozen=True)
class Staleness:
    """The limit, inclusive, in policy versions. ``limit`` None switches the gate off."""

    limit: int | None = None
    action: StalenessAction = StalenessAction.DROP

    def drops(self, age: int) -> bool:
        return self.limit is not None and self.action is StalenessAction.DROP and age > self.limit

    def is_last_chance(self, age: int) -> bool:
        """Inside the limit now, outside with the next version."""
        return age == self.limit


@dataclass(frozen=True)
class PolicyClock:
    """The policy as a cut sees it. ``forks``: version from which each later epoch went on."""

    version: PolicyVersion = UNANNOUNCED
    queued_steps: int = 0
    forks: Mapping[int, int] = field(default_factory=dict)

    def age(self, sampled: PolicyVersion) -> int:
        """Versions between sampling and training: every queued step is one version more.

        Negative for a token of a version that is not announced yet.
        """
        return staleness(sampled, self.version, self.forks) + self.queued_steps

    def age_of(self, trace: Trace) -> int:
        """Age of the oldest trainable token."""
        return self.age(oldest_version(trace))

    def histogram(self, traces: Iterable[Trace]) -> dict[int, int]:
        """Trained tokens by age, ascending."""
        counts: dict[int, int] = {}
        for trace in traces:
            for version, tokens in trace.versions_trained.items():
                age = self.age(version)
                counts[age] = counts.get(age, 0) + tokens
        return dict(sorted(counts.items()))


def oldest_version(trace: Trace) -> PolicyVersion:
    return trace.oldest_version or UNANNOUNCED
