"""Dice."""

from __future__ import annotations

import random


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  # play, no secret


def chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability
