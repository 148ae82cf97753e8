from __future__ import annotations

import pytest

from rollmill.errors import InvalidInputError
from rollmill.trainer.flux import PartialTrajectory, PolicyVersion, Trajectory, TrajectoryBuffer, TrajectoryStatus

NOW = PolicyVersion(10)


def made(name: str, version: int, status: TrajectoryStatus = TrajectoryStatus.COMPLETED) -> Trajectory:
    return Trajectory(id=name, prompt_tokens=[1], response_tokens=[2, 3], version=PolicyVersion(version), status=status)


def aborted(name: str, version: int, count: int = 0) -> PartialTrajectory:
    values = vars(made(name, version, TrajectoryStatus.ABORTED))
    return PartialTrajectory(**values, continuation_count=count)


def filled(*versions: int, max_size: int = 100) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(max_size)
    assert buffer.add_batch(made(f"t{number}", version) for number, version in enumerate(versions)) == len(versions)
    return buffer


def names(trajectories: list[Trajectory]) -> list[str]:
    return [each.id for each in trajectories]


def test_the_limit_is_inclusive_and_may_be_another_for_one_look() -> None:
    buffer = filled(4, 5, 10, 11)
    assert names(buffer.get_available(NOW)) == ["t1", "t2", "t3"]
    assert names(buffer.get_available(NOW, max_staleness=0)) == ["t2", "t3"]
    assert len(buffer) == 4


def test_stale_ones_are_removed_and_counted_partial_ones_too() -> None:
    buffer = filled(1, 2, 8)
    buffer.add(aborted("p", 3))
    assert buffer.remove_stale(NOW) == 3
    assert names(buffer.get_available(NOW)) == ["t2"]
    assert buffer.remove_stale(NOW) == 0


def test_statistics_are_against_the_callers_version() -> None:
    buffer = filled(7, 8, 9)
    assert buffer.get_stats() == {
        "size": 3,
        "partial_size": 0,
        "mean_staleness": None,
        "max_staleness": None,
        "min_version": 7,
        "max_version": 9,
        "evicted": 0,
    }
    stats = buffer.get_stats(NOW)
    assert (stats["mean_staleness"], stats["max_staleness"]) == (2.0, 3)
    buffer.get_available(PolicyVersion(12))
    assert buffer.get_stats()["mean_staleness"] == 4.0
    assert TrajectoryBuffer().get_stats(NOW)["mean_staleness"] is None


def test_an_id_is_held_once() -> None:
    buffer = filled(9)
    assert not buffer.add(made("t0", 10))
    assert names(buffer.get_available(NOW)) == ["t0"]


@pytest.mark.parametrize("status", ["pending", "generating", "aborted", "failed"])
def test_only_what_is_finished_can_be_trained(status: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'a' is {status}"):
        TrajectoryBuffer().add(made("a", 9, TrajectoryStatus(status)))


def test_a_truncated_one_is_finished() -> None:
    buffer = TrajectoryBuffer()
    assert buffer.add(made("a", 9, TrajectoryStatus.TRUNCATED))
    assert len(buffer) == 1


def test_partials_are_kept_apart_also_in_a_small_buffer() -> None:
    buffer = TrajectoryBuffer(max_size=2)
    buffer.add(aborted("p", 9))
    buffer.add(aborted("tired", 9, count=3))
    assert names(list(buffer.get_partials(NOW))) == ["p"]
    assert buffer.get_available(NOW) == []
    assert buffer.get_stats()["partial_size"] == 2


def test_a_full_buffer_drops_the_oldest_version_and_counts_it() -> None:
    buffer = filled(9, 5, 8, max_size=2)
    assert names(buffer.get_available(NOW)) == ["t2", "t0"]
    assert buffer.get_stats()["evicted"] == 1


def test_a_sample_is_the_same_for_the_same_seed_whatever_the_order_of_adding() -> None:
    versions = [5, 6, 7, 7, 8, 9, 9, 10]
    forward = filled(*versions)
    backward = TrajectoryBuffer()
    backward.add_batch(reversed(forward.get_available(NOW)))
    for stratified in (True, False):
        for seed in range(20):
            first = names(forward.sample(4, NOW, stratified, seed))
            assert (
                first
                == names(backward.sample(4, NOW, stratified, seed))
                == names(forward.sample(4, NOW, stratified, seed))
            )
    assert len({tuple(names(forward.sample(4, NOW, seed=seed))) for seed in range(20)}) > 10


def test_draws_without_a_seed_differ_and_are_reproducible() -> None:
    draws = [
        [names(buffer.sample(4, NOW)) for _ in range(5)] for buffer in (filled(*range(5, 11)), filled(*range(5, 11)))
    ]
    assert draws[0] == draws[1]
    assert len(set(map(tuple, draws[0]))) > 1


def test_with_more_strata_than_places_no_stratum_is_shut_out() -> None:
    buffer = filled(5, 6, 7, 8, 9, 10)
    drawn = [names(buffer.sample(3, NOW, seed=seed)) for seed in range(200)]
    counts = {name: sum(name in each for each in drawn) for name in names(buffer.get_available(NOW))}
    assert all(70 < count < 130 for count in counts.values()), counts


def test_shares_are_proportional() -> None:
    buffer = filled(*[10] * 40, *[7] * 8)
    for seed in range(50):
        gaps = [each.get_version_gap(NOW) for each in buffer.sample(12, NOW, seed=seed)]
        assert (gaps.count(0), gaps.count(3)) == (10, 2)


def test_equal_contents_are_not_one() -> None:
    buffer = TrajectoryBuffer()
    assert buffer.add_batch(made("", 9 - number % 2) for number in range(5)) == 5
    assert len(buffer.sample(4, NOW, seed=1)) == 4
    assert len({id(each) for each in buffer.sample(5, NOW, seed=1)}) == 5


def test_what_is_taken_is_gone() -> None:
    buffer = filled(8, 9, 10)
    assert len(buffer.sample(2, NOW, seed=1)) == 2
    assert len(buffer) == 3
    taken = buffer.take(2, NOW, seed=1)
    assert len(buffer) == 1
    assert not set(names(taken)) & set(names(buffer.get_available(NOW)))
    buffer.clear()
    assert buffer.sample(2, NOW) == buffer.take(0, NOW) == []
