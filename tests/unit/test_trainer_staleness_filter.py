import math

import pytest

from rollmill.models import BatchHeader, PolicyVersion
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.trainer.batches.staleness_filter import FilterResult, StaleAction, filter_step, unknown_epochs
from rollmill.trainer.layouts.safetensors_reader import read_batch

OLD = SampleTrace("old", reply=(1, 2), log_probs=(-1.0, -1.0), version=PolicyVersion(0, 3), weight=0.1, group_id="g1")
NEW = SampleTrace("new", version=PolicyVersion(0, 5), weight=0.7, group_id="g2")
OTHER = SampleTrace("other", version=PolicyVersion(0, 5), weight=0.3, group_id="g2")


def header(rank: int = 0, *, max_staleness: int | None = 2, **changes: object) -> BatchHeader:
    values = step_values(7, [[[OLD], [OTHER]], [[NEW], []]], max_staleness=max_staleness, **changes)
    return read_batch(values[rank][0]).header


def at(version: int, action: StaleAction = StaleAction.MASK, rank: int = 0) -> FilterResult:
    return filter_step(header(rank), PolicyVersion(0, version), {}, action)


def test_the_limit_is_inclusive() -> None:
    assert at(5).kept == (True, True, True)
    assert at(6).kept == (False, True, True)
    assert at(8).empty


def test_the_step_is_kept_as_cut_while_nothing_is_stale() -> None:
    assert at(5).denominators == header().denominators


def test_denominators_are_sums_over_what_is_left() -> None:
    left = at(6).denominators
    assert (left.tokens, left.rollouts, left.groups) == (6, 2, 1)
    assert left.weighted_tokens == math.fsum([0.7 * 3, 0.3 * 3])


def test_all_ranks_come_to_one_verdict() -> None:
    assert at(6, rank=0) == at(6, rank=1)


def test_a_step_may_be_dropped_as_a_whole() -> None:
    assert not at(5, StaleAction.DROP_STEP).empty
    dropped = at(6, StaleAction.DROP_STEP)
    assert dropped.empty
    assert dropped.cleared == 3


def test_without_a_limit_nothing_is_stale() -> None:
    assert filter_step(header(max_staleness=None), PolicyVersion(0, 999), {}).cleared == 0


def test_a_trace_newer_than_the_trainer_is_not_stale() -> None:
    assert at(0).cleared == 0


def test_a_constant_weighting_is_divided_by_the_rollouts_that_are_left() -> None:
    verdict = filter_step(header(loss_weighting="constant"), PolicyVersion(0, 6), {})
    assert verdict.denominators.weighted_tokens == 2.0


@pytest.mark.parametrize(("fork", "kept"), [(3, (True, True, True)), (2, (True, False, False)), (0, (False,) * 3)])
def test_versions_beyond_a_fork_age_from_the_fork(fork: int, kept: tuple[bool, ...]) -> None:
    # At 1:4 a record of 0:3 is 1 old for a fork at 3 or above, else (4 - f) + (3 - f); one of 0:5 (4 - f) + (5 - f).
    assert filter_step(header(max_staleness=3), PolicyVersion(1, 4), {1: fork}).kept == kept


def test_the_gate_names_the_epochs_that_it_must_know() -> None:
    assert unknown_epochs(header(), PolicyVersion(2, 0), {}) == [1, 2]
    assert unknown_epochs(header(), PolicyVersion(2, 0), {1: 4, 2: 0}) == []
    assert unknown_epochs(header(), PolicyVersion(0, 9), {}) == []
    assert unknown_epochs(header(), PolicyVersion(10**12, 0), {1: 4}) == list(range(2, 12))  # f11
