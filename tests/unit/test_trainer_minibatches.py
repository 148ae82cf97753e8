"""Mini-batches and replays of a step: rollouts whole, sums right, ranks in pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rollmill.errors import InvalidInputError
from rollmill.models import PolicyVersion
from rollmill.testing.samples.batches import SampleTrace, Steps, step_values
from rollmill.trainer import MiniBatch, Step
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.step_assembly import StepRecords, join_partitions
from rollmill.trainer.layouts.arrays import PackedArrays
from rollmill.trainer.layouts.safetensors_reader import read_batch

OLD = PolicyVersion(0, 0)
NEW = PolicyVersion(0, 3)


def trace(session: str, size: int, *, version: PolicyVersion = NEW, weight: float = 1.0) -> SampleTrace:
    reply = tuple(range(3, 3 + size))
    return SampleTrace(
        session, reply=reply, log_probs=(-0.5,) * size, version=version, weight=weight, group_id=f"g-{session[0]}"
    )


RANKS: Steps = [
    [[trace("a1", 3, weight=0.5), trace("a2", 5)], [trace("b1", 2)], [trace("c1", 4), trace("d1", 1)]],
    [[trace("a1", 6, weight=0.5), trace("stale", 7, version=OLD)], [trace("e1", 2)], []],
]
"""Rollout a1 has a trace on each rank."""


def step(rank: int, ranks: Steps = RANKS, **header: object) -> Step:
    values = step_values(4, ranks, max_staleness=2, **header)
    records = StepRecords(tuple(map(read_batch, values[rank])), {rank: 9})
    return Step(records, filter_step(records.header, NEW, {}), lambda _: None)


def whole(**header: object) -> Step:
    """Both partitions read by one rank."""
    values = step_values(4, RANKS, max_staleness=2, **header)
    parts = [StepRecords(tuple(map(read_batch, values[rank])), {rank: 9}) for rank in (0, 1)]
    records = join_partitions(parts)
    return Step(records, filter_step(records.header, NEW, {}), lambda _: None)


def sessions(step: Step, batches: Sequence[PackedArrays]) -> Counter[str]:
    rows = [row for packed in batches for row in packed.trace_index.tolist() if row >= 0]
    return Counter(step.header.table[row].session_id for row in rows)


def weight(batches: Sequence[PackedArrays]) -> float:
    return math.fsum(float(packed.loss_weight.sum()) for packed in batches)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_rollout_is_whole_in_one_minibatch_over_all_ranks(n: int) -> None:
    left, right = step(0), step(1)
    seen: list[set[str]] = []
    for mini, other in zip(left.minibatches(n), right.minibatches(n), strict=True):
        found = sessions(left, mini.arrays) + sessions(right, other.arrays)
        seen.append(set(found))
        assert found["a1"] in (0, 2)
    assert Counter(name for names in seen for name in names) == Counter(
        {"a1": 1, "a2": 1, "b1": 1, "c1": 1, "d1": 1, "e1": 1}
    )
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_denominators_are_those_of_the_minibatch_on_all_ranks(n: int) -> None:
    left, right = list(step(0).minibatches(n)), list(step(1).minibatches(n))
    for mini, other in zip(left, right, strict=True):
        assert mini.denominators == other.denominators
        assert mini.denominator == pytest.approx(weight(mini.arrays) + weight(other.arrays))
        assert mini.denominators.tokens == sum(int(packed.loss_mask.sum()) for packed in (*mini.arrays, *other.arrays))
    assert math.fsum(mini.denominator for mini in left) == pytest.approx(step(0).denominator)
    assert sum(mini.denominators.rollouts for mini in left) == step(0).denominators.rollouts == 6


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_ranks_keep_pace_and_no_micro_batch_outgrows_the_steps_largest(n: int) -> None:
    largest = max(len(packed.input_ids) for rank in (0, 1) for packed in step(rank).arrays)
    for mini, other in zip(step(0).minibatches(n), step(1).minibatches(n), strict=True):
        assert len(mini) == len(other) > 0
        assert max(len(packed.input_ids) for packed in (*mini.arrays, *other.arrays)) <= largest
        for batch in (*mini, *other):
            assert batch.filler == (not batch.loss_mask.any())
            assert len(batch.input_ids)


def test_a_step_has_no_more_parts_than_rollouts_and_at_least_one() -> None:
    assert len(list(step(0).minibatches(99))) == 6
    with pytest.raises(InvalidInputError, match="at least one part"):
        next(step(0).minibatches(0))


def test_constant_weighting_is_divided_by_the_rollouts_of_the_part() -> None:
    assert [mini.denominator for mini in step(0, loss_weighting="constant").minibatches(3)] == [2.0, 2.0, 2.0]


def test_two_partitions_on_one_rank_make_the_same_parts() -> None:
    both = whole()
    assert both.records.partitions == 2
    for mini, left, right in zip(both.minibatches(2), step(0).minibatches(2), step(1).minibatches(2), strict=True):
        assert mini.denominators == left.denominators
        assert weight(mini.arrays) == pytest.approx(weight(left.arrays) + weight(right.arrays))
        assert sessions(both, mini.arrays) == sessions(both, left.arrays) + sessions(both, right.arrays)


def test_a_trace_keeps_all_its_columns() -> None:
    (mini,) = step(0).minibatches(1)
    before = {row: columns for packed in step(0).arrays for row, columns in rows_of(packed).items()}
    after = {row: columns for packed in mini.arrays for row, columns in rows_of(packed).items()}
    assert after == before


def rows_of(packed: PackedArrays) -> dict[int, dict[str, list[float]]]:
    edges = packed.cu_seqlens.tolist()
    return {
        row: {
            name: getattr(packed, name)[edges[place] : edges[place + 1]].tolist()
            for name in ("input_ids", "position_ids", "loss_mask", "loss_weight", "versions", "turn_ids", "returns")
        }
        | {name: [getattr(packed, name)[place].item()] for name in ("rewards", "prompt_lengths", "group_index")}
        for place, row in enumerate(packed.trace_index.tolist())
    }


def contents(minis: Sequence[MiniBatch]) -> list[tuple[int, int, list[list[int]]]]:
    return [(mini.epoch, mini.number, [packed.trace_index.tolist() for packed in mini.arrays]) for mini in minis]


def test_a_replay_goes_over_the_step_again_in_an_order_of_its_own() -> None:
    passes = contents(list(step(0).replay(8, minibatches=3)))
    assert [epoch for epoch, _, _ in passes] == sorted([*range(8)] * 3)
    orders = [tuple(number for at, number, _ in passes if at == epoch) for epoch in range(8)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) > 1
    assert passes == contents(list(step(0).replay(8, minibatches=3)))
    other = [(mini.epoch, mini.number) for mini in step(1).replay(8, minibatches=3)]
    assert other == [(epoch, number) for epoch, number, _ in passes]


def test_a_replay_without_parts_is_the_step_each_time() -> None:
    seen = [mini.denominators for mini in step(0).replay(2)]
    assert seen == [step(0).denominators] * 2


def test_indices_are_the_same_on_all_ranks_and_none_in_a_filler() -> None:
    left, right = step(0), step(1)
    groups = [row.group_id for row in left.header.groups]
    for held in (left, right):
        for packed in held.arrays:
            for place, row in enumerate(packed.trace_index.tolist()):
                if row < 0:
                    assert (packed.group_index[place], packed.session_index[place]) == (-1, -1)
                else:
                    assert groups[packed.group_index[place]] == held.header.table[row].group_id
    first, second = left.arrays[0].session_index[0], right.arrays[0].session_index[0]
    assert first == second, "one rollout on two ranks"
    assert np.unique([left.arrays[0].session_index[1], first]).size == 2
