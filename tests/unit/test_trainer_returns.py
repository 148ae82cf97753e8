from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.models import Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import BATCHES, TRAJECTORIES
from rollmill.trainer.layouts.arrays import pack, returns
from rollmill.trainer.layouts.safetensors_reader import read_batch
from rollmill_batcher.groups.config import BatcherConfig, Learning, Size
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo

BOUNDS = np.array([0, 3, 5], np.int32)
REWARDS = np.array([0.5, -1.0], np.float32)


def test_a_return_is_the_sum_of_the_rewards_that_follow_in_its_trace() -> None:
    given_at_tokens = np.array([1, 0, 2, 0, 4], np.float32)
    assert returns(REWARDS * 0, given_at_tokens, BOUNDS).tolist() == [3, 2, 2, 4, 4]


def test_what_the_rollout_gets_after_the_trace_is_added_to_each_of_its_tokens() -> None:
    given_at_tokens = np.array([1, 0, 2, 0, 4], np.float32)
    assert returns(np.array([10, 0.5], np.float32), given_at_tokens, BOUNDS).tolist() == [13, 12, 12, 4.5, 4.5]


def rollout(name: str, *values: tuple[float, float] | None) -> Trajectory:
    """Two sampled tokens in each trace, with these rewards."""
    traces = [
        sample_trace(
            name, (Reply((5, 6)),), prompt=(1,), index=index, token_rewards=given and np.array(given, np.float32)
        )
        for index, given in enumerate(values)
    ]
    return sample_trajectory(name, 0.25, traces=traces)


@pytest.mark.parametrize(("world_size", "tokens"), [(1, 64), (2, 64), (3, 3)])
def test_returns_go_on_over_the_traces_of_a_rollout_wherever_they_are(world_size: int, tokens: int) -> None:
    """One rollout has token rewards in two of three traces, the other in none."""
    rules = BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("dr_grpo", DrGrpo()),
        groups_per_step=1,
        world_size=world_size,
        micro_batch=Size(tokens, 4096),
    )
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(rules))
    for member in (rollout("a", (1, 2), None, (4, 8)), rollout("b", None, None)):
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    found: dict[tuple[str, int], list[float]] = {}
    for batch in (read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)):
        packed = pack(batch, np.ones(len(batch.trace_index), np.bool_))
        for number, row in enumerate(packed.trace_index.tolist()):
            if row >= 0:
                start, stop = packed.cu_seqlens[number : number + 2]
                named = batch.header.table[row]
                found[named.session_id, named.trace] = packed.returns[start:stop].tolist()
    assert found == {
        ("a", 0): [15, 15, 14],
        ("a", 1): [12, 12, 12],
        ("a", 2): [12, 12, 8],
        ("b", 0): [0.25, 0.25, 0.25],
        ("b", 1): [0.25, 0.25, 0.25],
    }


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
