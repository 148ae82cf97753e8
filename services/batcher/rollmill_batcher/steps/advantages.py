"""Advantage strategies: from the rewards of a group's rollouts to advantages. The built-in plug-ins."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rollmill.strategies import BaseAdvantage

Floats = npt.NDArray[np.float64]


class Scale(StrEnum):
    """The standard deviation that centred rewards are divided by: of the group, of the whole step, or none."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class Grpo(BaseAdvantage):
    """Reward minus group mean, over a standard deviation plus ``eps`` (Shao et al. 2024, DeepSeekMath, eq. 3).

    ``scale`` ``batch`` takes the deviation of all graded rewards of the step; ``none`` leaves centred rewards
    (Liu et al. 2025, Dr. GRPO). ``ddof`` 1 is the sample deviation, 0 the population's.
    """

    def __init__(self, eps: float = 1e-4, ddof: int = 1, scale: str = "group") -> None:
        if eps < 0 or ddof not in (0, 1):
            raise ValueError(f"eps must not be negative and ddof is 0 or 1, not {eps} and {ddof}")
        self._eps, self._ddof, self._scale = eps, ddof, Scale(scale)

    def compute(self, rewards: Floats) -> Floats:
        centred = _centred(rewards)
        return centred / self._divisor(rewards) if self._scale is Scale.GROUP else centred

    def over_step(self, advantages: Floats, rewards: Floats) -> Floats:
        return advantages / self._divisor(rewards) if self._scale is Scale.BATCH else advantages

    def _divisor(self, rewards: Floats) -> float:
        """Standard deviation plus eps; 1 where equal rewards leave nothing to divide."""
        if len(rewards) <= self._ddof or np.ptp(rewards) == 0:
            return 1.0
        return float(rewards.std(ddof=self._ddof)) + self._eps


class DrGrpo(BaseAdvantage):
    """Reward minus group mean, divided by nothing (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    The other half of that paper, no division by a reply's length, is the loss weighting ``constant``.
    """

    def compute(self, rewards: Floats) -> Floats:
        return _centred(rewards)


class ReinforcePp(BaseAdvantage):
    """Reward minus group mean, then divided by the deviation of these over the step (Hu 2025, REINFORCE++ baseline).

    Without a KL term. ``eps`` is added to the sample variance, under the root. A rollout counts once in it, whatever
    its number of tokens; that is the published formula where all replies are equally long.
    """

    def __init__(self, eps: float = 1e-8) -> None:
        if eps < 0:
            raise ValueError(f"eps must not be negative, but is {eps}")
        self._eps = eps

    def compute(self, rewards: Floats) -> Floats:
        return _centred(rewards)

    def over_step(self, advantages: Floats, rewards: Floats) -> Floats:  # noqa: ARG002  # whitens centred rewards
        if not advantages.any():
            return advantages
        whitened: Floats = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + self._eps)
        return whitened


class Rloo(BaseAdvantage):
    """Reward minus the mean of the other rollouts (Ahmadian et al. 2024): n / (n - 1) times the centred reward."""

    def compute(self, rewards: Floats) -> Floats:
        count = len(rewards)
        advantages: Floats = _centred(rewards) * (count / (count - 1))
        return advantages


class NoAdvantage(BaseAdvantage):
    """Zeros: the trainer normalises itself, from ``group_index`` and the header's groups with all their rewards."""

    min_rollouts: ClassVar[int] = 1

    def compute(self, rewards: Floats) -> Floats:
        return np.zeros_like(rewards)


def _centred(rewards: Floats) -> Floats:
    """Exactly 0 where all are equal, whatever the rounding of their mean."""
    if not np.ptp(rewards):
        return np.zeros_like(rewards)
    centred: Floats = rewards - rewards.mean()
    return centred
