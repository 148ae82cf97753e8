"""Random decisions of a simulation."""

from __future__ import annotations

import random


def seeded_rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  # a simulation, no secret


def chance(rng: random.Random, probability: float) -> bool:
    """True with ``probability``."""
    return rng.random() < probability
