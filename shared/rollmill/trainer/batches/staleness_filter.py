"""The staleness filter at hand-over: the same result on every rank, without communication (rules A3, R2).

Every rank's header holds the whole step's table, so each rank clears the same traces and computes the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from rollmill.models import (
    BatchHeader,
    Denominators,
    PolicyVersion,
    TraceRow,
    token_ages,
    tokens_by_version,
    trace_age,
)

CONSTANT = "constant"
NAMED_EPOCHS = 10
"""Of those that are missing: an epoch is a number that anybody may write, so nothing may grow with it."""


class StaleAction(StrEnum):
    """What happens to traces older than the limit: only they are cleared, or the whole step is dropped."""

    MASK = "mask"
    DROP_STEP = "drop_step"


@dataclass(frozen=True)
class FilterResult:
    """What of a step is trained."""

    version: PolicyVersion
    """The version that staleness was measured against."""
    kept: tuple[bool, ...]
    """Per row of the header's table."""
    denominators: Denominators
    """Step-wide sums over the kept rows."""

    @property
    def empty(self) -> bool:
        return not self.denominators.tokens

    @property
    def cleared(self) -> int:
        """Number of traces cleared on all ranks."""
        return self.kept.count(False)


def filter_step(
    header: BatchHeader, current: PolicyVersion, forks: Mapping[int, int], action: StaleAction = StaleAction.MASK
) -> FilterResult:
    """What of the step is trained by a trainer at version ``current``. The limit is inclusive.

    ``forks``: the version that each later epoch was resumed from; it must hold all epochs up to the current one.
    """
    fresh = [_is_fresh(header, row, current, forks) for row in header.table]
    if all(fresh):
        return FilterResult(current, tuple(fresh), header.denominators)
    kept = fresh if action is StaleAction.MASK else [False] * len(fresh)
    rows = [row for row, keep in zip(header.table, kept, strict=True) if keep]
    return FilterResult(current, tuple(kept), denominators(rows, header.loss_weighting))


def _is_fresh(header: BatchHeader, row: TraceRow, current: PolicyVersion, forks: Mapping[int, int]) -> bool:
    """By the header's basis, over the tokens of the row that its step trains."""
    if header.max_staleness is None:
        return True
    tokens = tokens_by_version(row.units) or {row.oldest: row.mask_sum}
    return trace_age(token_ages(tokens, current, forks), header.staleness_basis) <= header.max_staleness


def denominators(rows: Sequence[TraceRow], loss_weighting: str) -> Denominators:
    """Sums over rows of a table; exact, so their order does not matter.

    With the weighting ``constant`` (Dr. GRPO) the loss is divided by the number of rollouts (rule A1).
    """
    rollouts = len({(row.session_id, row.attempt) for row in rows})
    weighted = math.fsum(row.loss_weight * row.mask_sum for row in rows)
    return Denominators(
        tokens=sum(row.mask_sum for row in rows),
        weighted_tokens=float(rollouts) if loss_weighting == CONSTANT else weighted,
        rollouts=rollouts,
        groups=len({row.group_id for row in rows}),
    )


def unknown_epochs(header: BatchHeader, current: PolicyVersion, forks: Mapping[int, int]) -> list[int]:
    """The first few epochs with a fork point that is needed and not in ``forks``."""
    oldest = min((row.oldest.epoch for row in header.table), default=current.epoch)
    missing = (epoch for epoch in range(oldest + 1, current.epoch + 1) if epoch not in forks)
    return list(islice(missing, NAMED_EPOCHS))
