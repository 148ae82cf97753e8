"""Loss weights and the denominators of a step (rule A1).

The loss of a step is the sum of ``weight * token loss`` over all trained tokens of all ranks and micro-batches,
divided by ``Denominators.weighted_tokens``. It does not depend on how traces are split or placed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rollmill.models import Denominators
from rollmill_batcher.groups.config import LossWeighting


@dataclass(frozen=True)
class Share:
    """Trained tokens of one trace, and whose they are."""

    group: str
    rollout: tuple[str, int]
    tokens: int


def loss_weights(weighting: LossWeighting, shares: Sequence[Share], constant: float) -> list[float]:
    """Weight of every trained token of each trace of a step, in the order of ``shares``."""
    if weighting is LossWeighting.ROLLOUT_MEAN:
        return _inverse([share.rollout for share in shares], shares)
    if weighting is LossWeighting.GROUP_MEAN:
        return _inverse([share.group for share in shares], shares)
    return [1.0 / constant if weighting is LossWeighting.CONSTANT else 1.0] * len(shares)


def _inverse(keys: Sequence[Hashable], shares: Sequence[Share]) -> list[float]:
    """1 / trained tokens of everything with the same key."""
    totals: dict[Hashable, int] = {}
    for key, share in zip(keys, shares, strict=True):
        totals[key] = totals.get(key, 0) + share.tokens
    return [1.0 / totals[key] for key in keys]


def denominators(weighting: LossWeighting, shares: Sequence[Share], weights: Sequence[float]) -> Denominators:
    """Step-wide sums, exact, so that no order of traces matters."""
    rollouts = len({share.rollout for share in shares})
    total = math.fsum(share.tokens * weight for share, weight in zip(shares, weights, strict=True))
    return Denominators(
        tokens=sum(share.tokens for share in shares),
        weighted_tokens=float(rollouts) if weighting is LossWeighting.CONSTANT else total,
        rollouts=rollouts,
        groups=len({share.group for share in shares}),
    )
