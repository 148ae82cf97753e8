"""Advantages against the published formulas of TRL and verl, by numbers computed here without our code.

TRL, GRPO trainer: (r - mean) / (std + 1e-4), std of the sample (ddof 1) by group or by batch, or no division.
TRL, RLOO trainer: r - (sum of the group - r) / (n - 1).
verl, GRPO: (r - mean) / (std + 1e-6), std of the sample; without the division it is Dr. GRPO.
verl, RLOO: n / (n - 1) * r - n / (n - 1) * mean.
verl, REINFORCE++ baseline: r - mean of the group, then over all tokens (x - mean) / sqrt(var + 1e-8), sample variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from rollmill.models import StrategySpec
from rollmill.strategies import BaseAdvantage, advantage_registry

GROUPS = [[1.0, 0.0, 0.5, 0.5], [3.0, -1.0, 2.0, 0.0], [0.25, 0.25, 0.25, 1.0]]
EQUAL = [[1.0, 0.0], [0.5, 0.5]]


def ours(name: str, groups: Sequence[Sequence[float]], **config: object) -> list[float]:
    strategy: BaseAdvantage = advantage_registry().create(StrategySpec(strategy=name, config=config))
    rewards = [np.array(group, dtype=np.float64) for group in groups]
    every = np.concatenate([strategy.compute(group) for group in rewards])
    return [float(value) for value in strategy.over_step(every, np.concatenate(rewards))]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int = 1) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - ddof))


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_grpo_is_trls_by_group() -> None:
    close(ours("grpo", GROUPS), [(r - mean(g)) / (std(g) + 1e-4) for g in GROUPS for r in g])


def test_grpo_is_trls_by_batch() -> None:
    deviation = std([r for g in GROUPS for r in g])
    close(ours("grpo", GROUPS, scale="batch"), [(r - mean(g)) / (deviation + 1e-4) for g in GROUPS for r in g])


def test_grpo_is_verls() -> None:
    close(ours("grpo", GROUPS, eps=1e-6), [(r - mean(g)) / (std(g) + 1e-6) for g in GROUPS for r in g])


def test_dr_grpo_is_verls_without_norm_and_trls_without_scale() -> None:
    expected = [r - mean(g) for g in GROUPS for r in g]
    close(ours("dr_grpo", GROUPS), expected)
    close(ours("grpo", GROUPS, scale="none"), expected)


def test_rloo_is_trls_and_verls() -> None:
    trl = [r - (sum(g) - r) / (len(g) - 1) for g in GROUPS for r in g]
    verl = [r * len(g) / (len(g) - 1) - mean(g) * len(g) / (len(g) - 1) for g in GROUPS for r in g]
    close(ours("rloo", GROUPS), trl)
    close(ours("rloo", GROUPS), verl)


def test_reinforce_pp_is_verls_where_replies_are_equally_long() -> None:
    """One token each, so whitening over tokens is whitening over rollouts."""
    centred = [r - mean(g) for g in GROUPS for r in g]
    deviation = math.sqrt(std(centred) ** 2 + 1e-8)
    close(ours("reinforce_pp", GROUPS), [(value - mean(centred)) / deviation for value in centred])


def test_by_hand() -> None:
    """Group 1, 0: mean 1/2, sample deviation sqrt(1/2)."""
    root = math.sqrt(0.5)
    close(ours("grpo", EQUAL), [0.5 / (root + 1e-4), -0.5 / (root + 1e-4), 0.0, 0.0])
    close(ours("rloo", EQUAL), [1.0, -1.0, 0.0, 0.0])
    close(ours("dr_grpo", EQUAL), [0.5, -0.5, 0.0, 0.0])
    whitened = 0.5 / math.sqrt(0.5 / 3 + 1e-8)
    close(ours("reinforce_pp", EQUAL), [whitened, -whitened, 0.0, 0.0])
    close(ours("none", EQUAL), [0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "none"])
def test_a_step_of_equal_rewards_gives_exact_zeros(name: str) -> None:
    assert set(ours(name, [[0.1] * 3, [0.7] * 3])) == {0.0}


def test_b060_groups_go_by_id_whatever_their_sizes_and_order() -> None:
    """Rewards 1, 3 | 5 | 0, 4: centred -1, +1 | 0 | -2, +2; the single one is refused by the strategy's minimum."""
    found = ours("dr_grpo", [[1.0, 3.0], [5.0], [0.0, 4.0]])
    close(found, [-1.0, 1.0, 0.0, -2.0, 2.0])
    shuffled = ours("dr_grpo", [[4.0, 0.0], [3.0, 1.0], [5.0]])
    close(shuffled, [2.0, -2.0, 1.0, -1.0, 0.0])


def test_the_order_within_a_group_moves_with_the_values() -> None:
    for name in ("grpo", "rloo", "dr_grpo", "reinforce_pp"):
        turned = [group[::-1] for group in GROUPS]
        plain = np.array(ours(name, GROUPS)).reshape(3, 4)
        close(ours(name, turned), list(chain.from_iterable(plain[:, ::-1].tolist())))


def test_bad_configs_of_the_new_strategies_are_refused() -> None:
    with pytest.raises(Exception, match="eps"):
        advantage_registry().create(StrategySpec(strategy="reinforce_pp", config={"eps": -1.0}))
