"""Which trace goes into which micro-batch of which rank (rules B4, A14). Pure arithmetic over lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill_batcher.groups.config import Size

Bin = tuple[int, ...]
"""Indices of the traces of a micro-batch, ascending; empty is a filler."""
Layout = tuple[tuple[Bin, ...], ...]
"""Micro-batches by rank and number."""


def plan_layout(sizes: Sequence[Size], budget: Size, ranks: int, seed: int) -> Layout:
    """Micro-batches by rank, the same number on every rank.

    No micro-batch is over ``budget``, given that no trace alone is. Ranks are balanced by the sum of squared
    lengths. The order of a rank's micro-batches is shuffled by ``seed``, the same way on all ranks.
    """
    bins = _equalised(first_fit_decreasing(sizes, budget), sizes, ranks)
    by_rank = _assigned(bins, sizes, ranks)
    order = np.random.default_rng(seed).permutation(len(by_rank[0]))
    return tuple(tuple(own[number] for number in order) for own in by_rank)


def first_fit_decreasing(sizes: Sequence[Size], budget: Size) -> list[Bin]:
    """As few bins as the classic heuristic finds: the longest first, each into the first bin with room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index].tokens, index)):
        size = sizes[index]
        target = next((b for b, (t, n) in enumerate(room) if size.tokens <= t and size.nbytes <= n), len(bins))
        if target == len(bins):
            bins.append([])
            room.append((budget.tokens, budget.nbytes))
        bins[target].append(index)
        room[target] = (room[target][0] - size.tokens, room[target][1] - size.nbytes)
    return [tuple(sorted(members)) for members in bins]


def _equalised(bins: list[Bin], sizes: Sequence[Size], ranks: int) -> list[Bin]:
    """A multiple of ``ranks`` bins: the costliest are halved; fillers where nothing can be halved."""
    bins = list(bins)
    while len(bins) % ranks or not bins:
        splittable = [members for members in bins if len(members) > 1]
        if not splittable:
            bins.append(())
            continue
        heaviest = max(splittable, key=lambda members: (_cost(members, sizes), members))
        bins.remove(heaviest)
        bins += _halves(heaviest, sizes)
    return bins


def _halves(members: Bin, sizes: Sequence[Size]) -> list[Bin]:
    parts: tuple[list[int], list[int]] = ([], [])
    for index in sorted(members, key=lambda index: (-sizes[index].tokens, index)):
        min(parts, key=lambda part: _cost(part, sizes)).append(index)
    return [tuple(sorted(part)) for part in parts]


def _assigned(bins: Sequence[Bin], sizes: Sequence[Size], ranks: int) -> list[list[Bin]]:
    """The costliest bin first, each to the rank with the least work among those that need more bins."""
    by_rank: list[list[Bin]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for members in sorted(bins, key=lambda members: (-_cost(members, sizes), members)):
        open_ranks = [rank for rank in range(ranks) if len(by_rank[rank]) < len(bins) // ranks]
        rank = min(open_ranks, key=lambda rank: (work[rank], rank))
        by_rank[rank].append(members)
        work[rank] += _cost(members, sizes)
    return by_rank


def _cost(members: Sequence[int], sizes: Sequence[Size]) -> int:
    return sum(sizes[index].cost for index in members)
