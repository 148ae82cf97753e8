from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trainer.returns import returns

BOUNDS = np.array([0, 3, 5], np.int32)
REWARDS = np.array([0.5, -1.0], np.float32)


def test_a_return_is_the_sum_of_the_rewards_that_follow_in_its_trace() -> None:
    given_at_tokens = np.array([1, 0, 2, 0, 4], np.float32)
    assert returns(REWARDS, given_at_tokens, BOUNDS).tolist() == [3, 2, 2, 4, 4]


def test_without_token_rewards_the_reward_counts_at_the_end() -> None:
    found = returns(REWARDS, None, BOUNDS)
    assert found.tolist() == [0.5, 0.5, 0.5, -1, -1]
    assert found.dtype == np.float32


def test_nothing_has_no_returns() -> None:
    assert returns(REWARDS[:0], REWARDS[:0], np.zeros(1, np.int32)).tolist() == []


@given(st.lists(st.lists(st.floats(-8, 8, width=16), max_size=6), max_size=5))
def test_returns_agree_with_adding_up_token_by_token(traces: list[list[float]]) -> None:
    bounds = np.cumsum([0, *map(len, traces)], dtype=np.int32)
    flat = np.array([value for values in traces for value in values], np.float32)
    wanted = [sum(values[place:]) for values in traces for place in range(len(values))]
    assert returns(np.zeros(len(traces), np.float32), flat, bounds).tolist() == pytest.approx(wanted, abs=1e-5)
