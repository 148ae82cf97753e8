"""Offsets that finish out of order, and the commit that tells of them."""

import pytest

from rollmill_evaluator.consumer.watermark import METADATA_LIMIT, OffsetTracker, Watermark, decode, encode


def begun(tracker: OffsetTracker, *offsets: int) -> list[int]:
    return [offset for offset in offsets if tracker.begin(offset)]


def test_the_watermark_is_the_first_offset_that_is_not_finished() -> None:
    tracker = OffsetTracker(Watermark(10))
    assert tracker.watermark() == Watermark(10)
    assert begun(tracker, 10, 11, 12, 13) == [10, 11, 12, 13]
    tracker.finish(11)
    tracker.finish(13)
    assert tracker.watermark() == Watermark(10, ((11, 12), (13, 14)))
    tracker.finish(10)
    assert tracker.watermark() == Watermark(12, ((13, 14),))
    tracker.finish(12)
    assert tracker.watermark() == Watermark(14)


# B102
def test_an_offset_that_repeats_while_it_runs_is_handled_once() -> None:
    tracker = OffsetTracker(Watermark(40))
    assert begun(tracker, 40, 41, 41, 42) == [40, 41, 42]
    for offset in (40, 42, 41):
        tracker.finish(offset)
    assert tracker.watermark() == Watermark(43)


def test_gaps_between_offsets_count_as_finished() -> None:
    tracker = OffsetTracker(Watermark(0))
    begun(tracker, 3, 7, 9)
    tracker.finish(7)
    assert tracker.watermark() == Watermark(3, ((4, 9),))
    tracker.finish(3)
    assert tracker.watermark() == Watermark(9)
    tracker.finish(9)
    tracker.advance_to(12)
    assert tracker.watermark() == Watermark(12)


def test_a_restart_repeats_only_what_was_running() -> None:
    first = OffsetTracker(Watermark(0))
    begun(first, 0, 1, 2, 3, 4)
    for offset in (1, 2, 4):
        first.finish(offset)
    second = OffsetTracker(first.watermark())
    assert second.position == 0
    assert begun(second, 0, 1, 2, 3, 4, 5) == [0, 3, 5]


def test_what_was_finished_before_a_restart_is_not_forgotten_by_a_commit_before_it_is_passed() -> None:
    tracker = OffsetTracker(Watermark(10, ((12, 20), (25, 26))))
    begun(tracker, 10)
    assert tracker.watermark() == Watermark(10, ((12, 20), (25, 26)))
    begun(tracker, 11)
    tracker.finish(11)
    assert tracker.watermark() == Watermark(10, ((11, 20), (25, 26)))
    tracker.finish(10)
    assert tracker.watermark() == Watermark(20, ((25, 26),))
    assert begun(tracker, 15, 19, 20) == [20]


def test_the_metadata_is_run_lengths_in_base_36() -> None:
    watermark = Watermark(1000, ((1001, 1037), (1040, 1041)))
    assert encode(watermark) == "r1:1.10.3.1"
    assert decode(1000, "r1:1.10.3.1") == watermark
    assert encode(Watermark(5)) == ""
    assert decode(5, "") == Watermark(5)


@pytest.mark.parametrize("text", ["x", "r1:", "r1:1", "r1:0.1", "r1:1.-2", "r1:a.b.c", "r2:1.1", "1.1", "r1:1..2"])
def test_metadata_of_another_origin_counts_as_none(text: str) -> None:
    assert decode(7, text) == Watermark(7)


def test_the_metadata_stays_within_its_limit_and_keeps_the_lowest_ranges() -> None:
    watermark = Watermark(0, tuple((start, start + 1) for start in range(1, 20_000, 2)))
    text = encode(watermark)
    assert METADATA_LIMIT - 8 < len(text) <= METADATA_LIMIT
    kept = decode(0, text).finished
    assert kept == watermark.finished[: len(kept)]
