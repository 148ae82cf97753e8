"""How the words of several evaluators become one. Pure; see `rollmill.models.RewardRule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rollmill.models import LARGEST_REWARD, RewardRule
from rollmill_reward_merger.trace_rewards import TraceReward, Values

Shared = tuple[float, TraceReward]
"""An evaluator's share, and what it says of a trace."""


class OutOfRangeError(ArithmeticError):
    """The combination is no number that a batch holds."""


def combine(rule: RewardRule, parts: Sequence[Shared]) -> TraceReward:
    """The word of all on one trace. Raises OutOfRangeError."""
    pick = PICKS.get(rule)
    word = _sum(parts) if pick is None else pick([word for _, word in parts])
    if word.reward is not None:
        ranged(word.reward)
    if word.tokens is not None and not np.abs(word.tokens).max(initial=0.0) <= LARGEST_REWARD:
        raise OutOfRangeError("a token's reward is larger than float32 holds")
    return word


def weighted(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Sum of share times value; None where any value is None. Raises OutOfRangeError.

    The parts are summed exactly, so their order does not matter, and a single part of share 1 comes out as it went in.
    """
    if any(value is None for _, value in parts):
        return None
    products = [share * value for share, value in parts if value is not None]
    if not all(map(math.isfinite, products)):
        raise OutOfRangeError("a weighted reward is no finite number")
    return ranged(math.fsum(products))


def ranged(value: float) -> float:
    if not abs(value) <= LARGEST_REWARD:
        raise OutOfRangeError(f"a reward of {value} is larger than float32 holds")
    return value


def extreme(values: Sequence[float | None], choose: Callable[[list[float]], float]) -> float | None:
    """Least or greatest; None where any value is None."""
    known = [value for value in values if value is not None]
    return choose(known) if known and len(known) == len(values) else None


def _sum(parts: Sequence[Shared]) -> TraceReward:
    reward = weighted([(share, word.reward) for share, word in parts])
    shaped = [(share, word) for share, word in parts if word.tokens is not None]
    if not shaped:
        return TraceReward(reward)
    return TraceReward(reward, _tokens(shaped), _turns(shaped))


def _tokens(shaped: Sequence[Shared]) -> Values:
    """In an order of their own, so that the order of the evaluators does not matter."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is no number then is refused
        arrays = [share * word.tokens for share, word in shaped if word.tokens is not None]
        return np.asarray(np.sort(np.stack(arrays), axis=0).sum(axis=0))


def _turns(shaped: Sequence[Shared]) -> tuple[float | None, ...] | None:
    given = [(share, word.turns) for share, word in shaped if word.turns is not None]
    if not given:
        return None
    columns = range(len(given[0][1]))
    return tuple(_turn([(share, turns[column]) for share, turns in given]) for column in columns)


def _turn(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Over those that say something of the turn; None where nobody does."""
    said = [(share, value) for share, value in parts if value is not None]
    return weighted(said) if said else None


def _least(words: Sequence[TraceReward]) -> TraceReward:
    return _extreme(words, min)


def _greatest(words: Sequence[TraceReward]) -> TraceReward:
    return _extreme(words, max)


def _extreme(words: Sequence[TraceReward], choose: Callable[[list[float]], float]) -> TraceReward:
    value = extreme([word.reward for word in words], choose)
    return TraceReward(None) if value is None else next(word for word in words if word.reward == value)


def _only(words: Sequence[TraceReward]) -> TraceReward:
    (word,) = words
    return word


PICKS: dict[RewardRule, Callable[[Sequence[TraceReward]], TraceReward]] = {
    RewardRule.MIN: _least,
    RewardRule.MAX: _greatest,
    RewardRule.FIRST: _only,
    RewardRule.LAST: _only,
}
"""Rules that take one evaluator's word as it is."""
