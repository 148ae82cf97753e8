"""How old a sampled token is when its step will be trained, and what follows from it (rules B3, A4).

`Staleness` is the limit and what is done about it, `PolicyClock` computes ages, `mask_stale_tokens` is the action
``mask``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from rollmill.models import PolicyVersion, StalenessBasis, TokenRange, Trace, staleness, trace_age

UNANNOUNCED = PolicyVersion()
"""Version of tokens without a label: the oldest that there is."""


class StalenessAction(StrEnum):
    """``drop``: a trace over the limit is not trained; ``mask``: its tokens over the limit are not.

    ``weight``: nothing is left out, a trace of age s weighs 1 / (s + 1); ``keep``: nothing happens.
    """

    DROP = "drop"
    MASK = "mask"
    WEIGHT = "weight"
    KEEP = "keep"


LIMITING = frozenset({StalenessAction.DROP, StalenessAction.MASK})


@dataclass(frozen=True)
class Staleness:
    """The limit, inclusive, in policy versions. ``limit`` None: there is none."""

    limit: int | None = None
    action: StalenessAction = StalenessAction.DROP
    basis: StalenessBasis = StalenessBasis.OLDEST

    @property
    def enforced(self) -> int | None:
        """The limit, where something is left out because of it."""
        return self.limit if self.action in LIMITING else None

    @property
    def masks(self) -> bool:
        return self.limit is not None and self.action is StalenessAction.MASK

    def drops(self, age: float) -> bool:
        """Whether a trace of this age is left out as a whole."""
        return self.limit is not None and self.action is StalenessAction.DROP and age > self.limit

    def is_last_chance(self, age: float) -> bool:
        """Inside the limit now, outside with the next version."""
        return self.enforced is not None and self.enforced - 1 < age <= self.enforced

    def weight(self, age: float) -> float:
        """Factor of a trace's loss weight. A token of a version that is not announced yet counts as age 0."""
        return 1.0 / (max(age, 0.0) + 1.0) if self.action is StalenessAction.WEIGHT else 1.0


@dataclass(frozen=True)
class PolicyClock:
    """The policy at a cut: the newest announced version, and the steps that are cut and not yet acknowledged.

    ``forks``: by epoch, the version from which it was resumed.
    """

    version: PolicyVersion = UNANNOUNCED
    queued_steps: int = 0
    forks: Mapping[int, int] = field(default_factory=dict)

    def age(self, sampled: PolicyVersion) -> int:
        """Versions between sampling and training: every queued step is one version more.

        Negative for a token of a version that is not announced yet.
        """
        return staleness(sampled, self.version, self.forks) + self.queued_steps

    def ages(self, trace: Trace) -> dict[int, int]:
        """Trained tokens by age; a trace without labels is of the oldest version."""
        counts: dict[int, int] = {}
        for version, tokens in (trace.versions_trained or {UNANNOUNCED: trace.trained_tokens}).items():
            age = self.age(version)
            counts[age] = counts.get(age, 0) + tokens
        return counts

    def age_of(self, trace: Trace, basis: StalenessBasis = StalenessBasis.OLDEST) -> float:
        return trace_age(self.ages(trace), basis)

    def histogram(self, traces: Iterable[Trace]) -> dict[int, int]:
        """Trained tokens by age, ascending."""
        counts: dict[int, int] = {}
        for trace in traces:
            for age, tokens in self.ages(trace).items():
                counts[age] = counts.get(age, 0) + tokens
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class AgeSplit:
    """Number of traces by the versions that passed while they were sampled, and by those that passed since."""

    generation: Mapping[int, int]
    queue: Mapping[int, int]


def age_split(clock: PolicyClock, traces: Iterable[Trace]) -> AgeSplit:
    generation: dict[int, int] = {}
    queue: dict[int, int] = {}
    for trace in traces:
        ages = clock.ages(trace)
        newest, span = min(ages), max(ages) - min(ages)
        generation[span] = generation.get(span, 0) + 1
        queue[newest] = queue.get(newest, 0) + 1
    return AgeSplit(dict(sorted(generation.items())), dict(sorted(queue.items())))


def oldest_version(trace: Trace) -> PolicyVersion:
    return trace.oldest_version or UNANNOUNCED


@dataclass(frozen=True)
class MaskedTrace:
    """``trace`` with mask 0 at stale tokens; ``fresh`` and ``stale`` divide the units of the trace between them."""

    trace: Trace
    fresh: tuple[TokenRange, ...]
    stale: tuple[TokenRange, ...]


def mask_stale_tokens(trace: Trace, is_stale: Callable[[PolicyVersion], bool]) -> MaskedTrace:
    """The action ``mask``: of a trace that a weight update has split, only the tokens inside the limit train.

    A unit never spans versions, so it is stale as a whole or not at all.
    """
    units = trace.units()
    kept = np.logical_not(_stale_tokens(trace, is_stale))
    if kept.all():
        return MaskedTrace(trace, units, ())
    mask = trace.loss_mask * kept.astype(np.uint8)
    fresh = tuple(unit for unit in units if not is_stale(unit.version))
    stale = tuple(unit for unit in units if is_stale(unit.version))
    return MaskedTrace(trace.replace(loss_mask=mask), fresh, stale)


def _stale_tokens(trace: Trace, is_stale: Callable[[PolicyVersion], bool]) -> npt.NDArray[np.bool_]:
    """Booleans [r], over the response."""
    if not trace.versions:
        return np.full(len(trace.response_ids), is_stale(UNANNOUNCED))
    flags = [run.version is not None and is_stale(run.version) for run in trace.versions]
    return np.repeat(np.array(flags), [run.length for run in trace.versions])
