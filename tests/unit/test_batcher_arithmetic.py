"""Advantages, loss weights, packing and staleness of the batcher, by value."""

import math

import numpy as np
import pytest

from rollmill.errors import InvalidInputError
from rollmill.models import PolicyVersion, StrategySpec
from rollmill.strategies import advantage_registry
from rollmill.testing.samples.trajectories import Reply, sample_trace
from rollmill_batcher.groups.config import LossWeighting, Size
from rollmill_batcher.groups.staleness import PolicyClock, Staleness, oldest_version
from rollmill_batcher.steps.advantages import Grpo, NoAdvantage, Rloo
from rollmill_batcher.steps.loss_weights import TrainedTokens, denominators, loss_weights
from rollmill_batcher.steps.packing import first_fit_decreasing, plan_layout

REWARDS = np.array([1.0, 0.0, 0.5, 0.5])


def test_grpo_divides_by_the_sample_deviation_plus_eps() -> None:
    deviation = math.sqrt((0.25 + 0.25) / 3)
    expected = np.array([0.5, -0.5, 0.0, 0.0]) / (deviation + 1e-4)
    np.testing.assert_allclose(Grpo().compute(REWARDS), expected, rtol=1e-12)


def test_grpo_by_the_population_deviation() -> None:
    expected = np.array([0.5, -0.5, 0.0, 0.0]) / (math.sqrt(0.5 / 4) + 1e-6)
    np.testing.assert_allclose(Grpo(eps=1e-6, ddof=0).compute(REWARDS), expected, rtol=1e-12)


def test_grpo_scaled_by_the_step_uses_all_rewards() -> None:
    strategy = Grpo(scale="batch", eps=0.0)
    rewards = np.array([1.0, 3.0, 0.0, 4.0])
    centred = np.concatenate([strategy.compute(rewards[:2]), strategy.compute(rewards[2:])])
    assert centred.tolist() == [-1.0, 1.0, -2.0, 2.0]
    deviation = math.sqrt((1 + 1 + 4 + 4) / 3)
    np.testing.assert_allclose(strategy.over_step(centred, rewards), centred / deviation, rtol=1e-12)


def test_grpo_without_scale_only_centres() -> None:
    strategy = Grpo(scale="none")
    assert strategy.compute(REWARDS).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert strategy.over_step(REWARDS, REWARDS) is REWARDS


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_zeros_and_no_nan(scale: str) -> None:
    strategy, rewards = Grpo(scale=scale, eps=0.0), np.full(3, 0.1)
    found = strategy.over_step(strategy.compute(rewards), rewards)
    np.testing.assert_allclose(found, 0.0, atol=1e-15)


def test_rloo_compares_with_the_others() -> None:
    rewards = np.array([1.0, 0.0, 2.0])
    np.testing.assert_allclose(Rloo().compute(rewards), [1.0 - 1.0, 0.0 - 1.5, 2.0 - 0.5], rtol=1e-12)


def test_no_advantage_is_zero_and_takes_single_rollouts() -> None:
    assert NoAdvantage().compute(np.array([0.7])).tolist() == [0.0]
    assert (NoAdvantage.min_rollouts, Grpo.min_rollouts) == (1, 2)


def test_strategies_are_found_by_name_and_bad_configs_refused() -> None:
    registry = advantage_registry()
    assert isinstance(registry.create(StrategySpec(strategy="rloo")), Rloo)
    for config in ({"scale": "median"}, {"ddof": 2}, {"eps": -1.0}, {"gamma": 1.0}):
        with pytest.raises(InvalidInputError):
            registry.create(StrategySpec(strategy="grpo", config=config))


TRAINED = [
    TrainedTokens("g", ("a", 1), 4),
    TrainedTokens("g", ("a", 1), 2),
    TrainedTokens("g", ("b", 1), 4),
    TrainedTokens("h", ("c", 1), 5),
]


def test_token_mean_divides_by_all_trained_tokens() -> None:
    """Micro-batches of 2, 8 and 0 trained tokens with losses 6, 4 and 0: one mean over tokens, no mean of means."""
    trained = [TrainedTokens("g", ("a", 1), 2), TrainedTokens("g", ("b", 1), 8)]
    weights = loss_weights(LossWeighting.TOKEN_MEAN, trained, 1.0)
    assert (6.0 * weights[0] + 4.0 * weights[1]) / denominators(
        LossWeighting.TOKEN_MEAN, trained, weights
    ).tokens == 1.0


@pytest.mark.parametrize(
    ("weighting", "weights", "denominator"),
    [
        (LossWeighting.TOKEN_MEAN, [1.0, 1.0, 1.0, 1.0], 15.0),
        (LossWeighting.ROLLOUT_MEAN, [1 / 6, 1 / 6, 1 / 4, 1 / 5], 3.0),
        (LossWeighting.GROUP_MEAN, [1 / 10, 1 / 10, 1 / 10, 1 / 5], 2.0),
        (LossWeighting.CONSTANT, [1 / 64, 1 / 64, 1 / 64, 1 / 64], 3.0),
    ],
)
def test_weights_and_their_denominator(weighting: LossWeighting, weights: list[float], denominator: float) -> None:
    assert loss_weights(weighting, TRAINED, 64.0) == pytest.approx(weights, rel=1e-15)
    found = denominators(weighting, TRAINED, weights)
    assert found.weighted_tokens == pytest.approx(denominator, rel=1e-12)
    assert (found.tokens, found.rollouts, found.groups) == (15, 3, 2)


def sizes(*tokens: int) -> list[Size]:
    return [Size(count, 9 * count) for count in tokens]


BUDGET = Size(10, 1000)


def test_first_fit_decreasing_fills_the_first_bin_with_room() -> None:
    assert first_fit_decreasing(sizes(3, 7, 5, 2, 3), BUDGET) == [(0, 1), (2, 3, 4)]


def test_bytes_bound_a_bin_like_tokens() -> None:
    assert first_fit_decreasing([Size(1, 600), Size(1, 500), Size(1, 400)], BUDGET) == [(0, 2), (1,)]


def test_the_heaviest_bin_is_halved_before_a_filler_is_made() -> None:
    found = plan_layout(sizes(5, 5), BUDGET, 2, seed=0)
    assert found == (((0,),), ((1,),))


def test_a_filler_stands_where_nothing_can_be_halved() -> None:
    assert sorted(plan_layout(sizes(10), BUDGET, 2, seed=0)) == [((),), ((0,),)]


def test_ranks_are_balanced_by_squared_lengths() -> None:
    """One trace of 8 costs as much as sixteen of 2, not as four."""
    lengths = (8, 8, 6, 6, 6, 6, 4, 4, 4, 4, 4, 4)
    found = plan_layout(sizes(*lengths), Size(8, 1000), 2, seed=3)
    work = [sum(lengths[i] ** 2 for members in share for i in members) for share in found]
    assert len(found[0]) == len(found[1])
    assert abs(work[0] - work[1]) <= 16


def test_the_seed_orders_micro_batches_the_same_way_on_all_ranks() -> None:
    lengths = tuple(range(2, 10)) * 2
    plain, other = (plan_layout(sizes(*lengths), Size(9, 1000), 2, seed=seed) for seed in (1, 2))
    assert plain != other
    assert [sorted(share) for share in plain] == [sorted(share) for share in other]
    longest = [[max(lengths[i] for i in members) for members in share] for share in plain]
    assert longest[0] == longest[1]


def test_age_is_inclusive_and_counts_queued_steps() -> None:
    rule, clock = Staleness(2), PolicyClock(PolicyVersion(0, 5), queued_steps=1)
    assert [rule.drops(clock.age(PolicyVersion(0, version))) for version in (5, 4, 3)] == [False, False, True]
    assert [rule.is_last_chance(clock.age(PolicyVersion(0, version))) for version in (5, 4, 3)] == [False, True, False]
    assert not Staleness(None).drops(1000)


def test_what_waits_grows_old() -> None:
    """Finished at version 5 with limit 3: fine at 8, dropped at 9."""
    sampled, rule = PolicyVersion(0, 5), Staleness(3)
    assert not rule.drops(PolicyClock(PolicyVersion(0, 8)).age(sampled))
    assert rule.drops(PolicyClock(PolicyVersion(0, 9)).age(sampled))


def test_age_over_a_rewind_counts_both_ways_from_the_fork() -> None:
    clock = PolicyClock(PolicyVersion(1, 12), forks={1: 10})
    assert clock.age(PolicyVersion(0, 9)) == 3
    assert clock.age(PolicyVersion(0, 14)) == (12 - 10) + (14 - 10)


def test_the_age_of_a_trace_is_that_of_its_oldest_trained_token() -> None:
    trace = sample_trace("s", (Reply((5, 6), PolicyVersion(0, 3), then=(9,)), Reply((7, 8), PolicyVersion(0, 4))))
    assert oldest_version(trace) == PolicyVersion(0, 3)
    clock = PolicyClock(PolicyVersion(0, 5))
    assert clock.age_of(trace) == 2
    assert clock.histogram([trace, trace]) == {1: 4, 2: 4}
