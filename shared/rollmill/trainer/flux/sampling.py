"""Seeded draws that depend on what there is, and not on the order in which it came."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """``key`` orders candidates; two of one key have to be alike. ``stratum`` is what a draw is spread over."""

    key: str
    stratum: int
    item: T


def draw(candidates: Sequence[Candidate[T]], n: int, seed: Hashable, *, stratified: bool) -> list[T]:
    """``min(n, N)`` different candidates of N, each with probability n / N, in random order.

    Stratified: systematic sampling over the candidates laid out stratum by stratum, shuffled within each (Cochran,
    *Sampling Techniques*, chapter 8). A stratum with the share s of the candidates gets n s, rounded down or up.
    """
    rng = random.Random(repr(seed))  # noqa: S311  # for reproducible draws, not for secrets
    ordered = sorted(candidates, key=lambda each: (each.stratum, each.key))
    n = min(max(n, 0), len(ordered))
    chosen = _systematic(ordered, n, rng) if stratified else rng.sample(ordered, n)
    rng.shuffle(chosen)
    return [each.item for each in chosen]


def _systematic(ordered: Sequence[Candidate[T]], n: int, rng: random.Random) -> list[Candidate[T]]:
    line: list[Candidate[T]] = []
    for _, stratum in groupby(ordered, key=lambda each: each.stratum):
        members = list(stratum)
        rng.shuffle(members)
        line += members
    # In whole numbers: with floats the last place could be N itself.
    offset = rng.randrange(len(line)) if line else 0
    return [line[(offset + place * len(line)) // n] for place in range(n)]
