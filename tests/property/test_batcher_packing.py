"""Packing of long-tailed traces: how full, no token lost or doubled, and what equal counts per rank cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_batcher.groups.config import Size
from rollmill_batcher.steps.packing import Bin, first_fit_decreasing, plan_layout

TOKENS = 32768
BUDGET = Size(TOKENS, 9 * TOKENS)
TRACES = 1024

distributions = st.sampled_from(["lognormal", "pareto", "mixture"])
seeds = st.integers(0, 2**32 - 1)


def long_tailed(kind: str, seed: int, count: int = TRACES) -> list[Size]:
    """Lengths of agents' traces: most short, some at the limit."""
    draw = np.random.default_rng(seed)
    if kind == "lognormal":
        lengths = draw.lognormal(mean=8.0, sigma=1.0, size=count)
    elif kind == "pareto":
        lengths = 1000 * (1 + draw.pareto(1.5, size=count))
    else:
        lengths = np.where(draw.random(count) < 0.9, draw.normal(2500, 900, count), draw.uniform(8000, TOKENS, count))
    return [Size(length, 9 * length) for length in np.clip(lengths, 16, TOKENS).astype(int).tolist()]


def fullness(sizes: list[Size], bins: int) -> float:
    return sum(size.tokens for size in sizes) / (bins * TOKENS)


@settings(max_examples=25, deadline=None)
@given(kind=distributions, seed=seeds)
def test_packing_is_at_least_97_percent_full_before_rounding(kind: str, seed: int) -> None:
    sizes = long_tailed(kind, seed)
    bins = first_fit_decreasing(sizes, BUDGET)
    assert sorted(index for members in bins for index in members) == list(range(TRACES))
    assert all(sum(sizes[index].tokens for index in members) <= TOKENS for members in bins)
    assert fullness(sizes, len(bins)) >= 0.97


def placed(layout: tuple[tuple[Bin, ...], ...]) -> list[int]:
    return sorted(index for bins in layout for members in bins for index in members)


@settings(max_examples=10, deadline=None)
@given(kind=distributions, seed=seeds, ranks=st.sampled_from([1, 2, 8]))
def test_rounding_costs_less_than_one_micro_batch_per_rank(kind: str, seed: int, ranks: int) -> None:
    """The count is the next multiple of the number of ranks, all of them within the budget."""
    sizes = long_tailed(kind, seed)
    full = len(first_fit_decreasing(sizes, BUDGET))
    layout = plan_layout(sizes, BUDGET, ranks, seed=seed % 100)
    assert placed(layout) == list(range(TRACES))
    assert all(sum(sizes[i].tokens for i in members) <= TOKENS for bins in layout for members in bins)
    assert {len(bins) for bins in layout} == {-(-full // ranks)}


@pytest.mark.parametrize(("ranks", "micro_batches", "full"), [(1, 135, 0.9931), (2, 136, 0.9858), (8, 136, 0.9858)])
def test_the_figures_for_one_step(ranks: int, micro_batches: int, full: float) -> None:
    """1,024 lognormal traces: micro-batches of all ranks, and how full they are after rounding to equal counts."""
    sizes = long_tailed("lognormal", 7)
    layout = plan_layout(sizes, BUDGET, ranks, seed=0)
    count = sum(map(len, layout))
    assert (count, round(fullness(sizes, count), 4)) == (micro_batches, full)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, ranks=st.sampled_from([2, 8]))
def test_ranks_get_about_the_same_attention_cost(seed: int, ranks: int) -> None:
    """The heaviest rank is above the mean by less than one micro-batch's worth of the longest trace."""
    sizes = long_tailed("lognormal", seed, count=256)
    layout = plan_layout(sizes, BUDGET, ranks, seed=0)
    work = [sum(sizes[i].cost for members in bins for i in members) for bins in layout]
    assert max(work) - sum(work) / ranks <= TOKENS**2
