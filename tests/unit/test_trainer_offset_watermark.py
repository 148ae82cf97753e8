from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import InvalidInputError
from rollmill.trainer.trajectories.offset_watermark import OffsetWatermark


def test_the_boundary_is_the_first_open_offset_over_all_gaps() -> None:
    place = OffsetWatermark().finishing([5, 9], handed_out={0, 5, 7, 9}, position=12)
    assert (place.next_offset, place.done) == (0, (5, 9))
    place = place.finishing([0], handed_out={0, 7}, position=12)
    assert (place.next_offset, place.done) == (7, (9,))
    place = place.finishing([7], handed_out={7}, position=12)
    assert (place.next_offset, place.done) == (12, ())


def test_too_many_gaps_are_refused_before_the_broker_refuses_them() -> None:
    with pytest.raises(InvalidInputError, match="finish older ones first"):
        OffsetWatermark(done=tuple(range(1000, 3000))).metadata()
    assert OffsetWatermark(done=(3,)).metadata() == '{"done":[3],"reached":0}'


def test_going_back_remembers_how_far_it_had_come() -> None:
    checkpoint = OffsetWatermark(next_offset=2, done=(4,))
    back = OffsetWatermark(next_offset=5, done=(7,)).back_to(checkpoint)
    assert (back.next_offset, back.done, back.reached) == (2, (4,), 8)
    assert OffsetWatermark(next_offset=2).back_to(back).reached == 8
    assert back.finishing([2], {2, 3}, 5).reached == 8


@given(st.sets(st.integers(0, 60), min_size=1), st.randoms(use_true_random=False))
def test_nothing_is_finished_that_was_not_and_in_the_end_everything(offsets: set[int], random: object) -> None:
    order = sorted(offsets)
    random.shuffle(order)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    place, still_open, position = OffsetWatermark(), set(offsets), max(offsets) + 1
    for offset in order:
        place = place.finishing([offset], still_open, position)
        still_open.discard(offset)
        seen_again = {each for each in offsets if each >= place.next_offset and each not in place.done}
        assert seen_again == still_open
    assert (place.next_offset, place.done) == (position, ())
