"""Loss weights and the denominators of a step (rule A1).

The loss of a step is the sum of ``weight * token loss`` over all trained tokens of all ranks and micro-batches,
divided by ``Denominators.weighted_tokens``. It does not depend on how traces are split or assigned to ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rollmill.models import Denominators
from rollmill_batcher.groups.config import LossWeighting


@dataclass(frozen=True)
class TrainedTokens:
    """Number of trained tokens of one trace, and its group and rollout (session, attempt)."""

    group: str
    rollout: tuple[str, int]
    tokens: int


def loss_weights(weighting: LossWeighting, trained: Sequence[TrainedTokens], constant: float) -> list[float]:
    """Weight of every trained token of each trace of a step, in the order of ``trained``."""
    if weighting is LossWeighting.ROLLOUT_MEAN:
        return _inverse([each.rollout for each in trained], trained)
    if weighting is LossWeighting.GROUP_MEAN:
        return _inverse([each.group for each in trained], trained)
    return [1.0 / constant if weighting is LossWeighting.CONSTANT else 1.0] * len(trained)


def _inverse(keys: Sequence[Hashable], trained: Sequence[TrainedTokens]) -> list[float]:
    """1 / trained tokens of all traces with the same key."""
    totals: dict[Hashable, int] = {}
    for key, each in zip(keys, trained, strict=True):
        totals[key] = totals.get(key, 0) + each.tokens
    return [1.0 / totals[key] for key in keys]


def denominators(weighting: LossWeighting, trained: Sequence[TrainedTokens], weights: Sequence[float]) -> Denominators:
    """Step-wide sums, exact, so that no order of traces matters."""
    rollouts = len({each.rollout for each in trained})
    total = math.fsum(each.tokens * weight for each, weight in zip(trained, weights, strict=True))
    return Denominators(
        tokens=sum(each.tokens for each in trained),
        weighted_tokens=float(rollouts) if weighting is LossWeighting.CONSTANT else total,
        rollouts=rollouts,
        groups=len({each.group for each in trained}),
    )
