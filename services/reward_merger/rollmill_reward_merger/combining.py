"""How the rewards that several evaluators give a trace become one. Pure; see `rollmill.models.RewardRule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rollmill.models import LARGEST_REWARD, RewardRule
from rollmill_reward_merger.trace_rewards import TokenValues, TraceReward

Weighted = tuple[float, TraceReward]
"""The weight of an evaluator, and what it gives a trace."""


class OutOfRangeError(ArithmeticError):
    """The combination is no number that a batch can hold."""


def combine(rule: RewardRule, rewards: Sequence[Weighted]) -> TraceReward:
    """One trace's reward from those of all evaluators. Raises OutOfRangeError."""
    pick = PICKS.get(rule)
    combined = _sum(rewards) if pick is None else pick([reward for _, reward in rewards])
    if combined.reward is not None:
        check_range(combined.reward)
    if combined.tokens is not None and not np.abs(combined.tokens).max(initial=0.0) <= LARGEST_REWARD:
        raise OutOfRangeError("a token's reward is larger than float32 holds")
    return combined


def weighted_sum(values: Sequence[tuple[float, float | None]]) -> float | None:
    """Sum of weight times value; None where any value is None. Raises OutOfRangeError.

    The sum is exact, so the order does not matter, and a single value of weight 1 comes out unchanged.
    """
    if any(value is None for _, value in values):
        return None
    products = [weight * value for weight, value in values if value is not None]
    if not all(map(math.isfinite, products)):
        raise OutOfRangeError("a weighted reward is no finite number")
    return check_range(math.fsum(products))


def check_range(value: float) -> float:
    if not abs(value) <= LARGEST_REWARD:
        raise OutOfRangeError(f"a reward of {value} is larger than float32 holds")
    return value


def extreme(values: Sequence[float | None], choose: Callable[[list[float]], float]) -> float | None:
    """Least or greatest; None where any value is None."""
    known = [value for value in values if value is not None]
    return choose(known) if known and len(known) == len(values) else None


def _sum(rewards: Sequence[Weighted]) -> TraceReward:
    reward = weighted_sum([(weight, each.reward) for weight, each in rewards])
    shaped = [(weight, each) for weight, each in rewards if each.tokens is not None]
    if not shaped:
        return TraceReward(reward)
    return TraceReward(reward, _tokens(shaped), _turns(shaped))


def _tokens(shaped: Sequence[Weighted]) -> TokenValues:
    """Sorted before they are summed, so that the order of the evaluators does not matter."""
    with np.errstate(over="ignore", invalid="ignore"):  # `combine` refuses a result that is not finite
        arrays = [weight * each.tokens for weight, each in shaped if each.tokens is not None]
        return np.asarray(np.sort(np.stack(arrays), axis=0).sum(axis=0))


def _turns(shaped: Sequence[Weighted]) -> tuple[float | None, ...] | None:
    given = [(weight, each.turns) for weight, each in shaped if each.turns is not None]
    if not given:
        return None
    columns = range(len(given[0][1]))
    return tuple(_turn([(weight, turns[column]) for weight, turns in given]) for column in columns)


def _turn(rewards: Sequence[tuple[float, float | None]]) -> float | None:
    """Over the evaluators that give the turn a reward; None where there is none."""
    given = [(weight, value) for weight, value in rewards if value is not None]
    return weighted_sum(given) if given else None


def _least(rewards: Sequence[TraceReward]) -> TraceReward:
    return _extreme(rewards, min)


def _greatest(rewards: Sequence[TraceReward]) -> TraceReward:
    return _extreme(rewards, max)


def _extreme(rewards: Sequence[TraceReward], choose: Callable[[list[float]], float]) -> TraceReward:
    value = extreme([each.reward for each in rewards], choose)
    return TraceReward(None) if value is None else next(each for each in rewards if each.reward == value)


def _only(rewards: Sequence[TraceReward]) -> TraceReward:
    (reward,) = rewards
    return reward


PICKS: dict[RewardRule, Callable[[Sequence[TraceReward]], TraceReward]] = {
    RewardRule.MIN: _least,
    RewardRule.MAX: _greatest,
    RewardRule.FIRST: _only,
    RewardRule.LAST: _only,
}
"""Rules that take the rewards of one evaluator unchanged."""
