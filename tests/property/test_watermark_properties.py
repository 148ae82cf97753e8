"""Random orders of finishing, random crashes: nothing is lost, nothing finished is repeated, commits never lie."""

from hypothesis import given
from hypothesis import strategies as st

from rollmill_evaluator.consumer.watermark import OffsetTracker, Watermark, decode, encode

offsets = st.lists(st.integers(0, 60), unique=True, max_size=25).map(sorted)


@st.composite
def runs(draw: st.DrawFn) -> Watermark:
    """Any watermark: ascending, disjoint, not touching."""
    steps = draw(st.lists(st.integers(1, 2**40), max_size=20))
    at = draw(st.integers(0, 2**50))
    watermark, ranges = at, []
    for gap, length in zip(steps[::2], steps[1::2], strict=False):
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return Watermark(watermark, tuple(ranges))


@given(runs())
def test_a_commit_reads_back_as_it_was_written(watermark: Watermark) -> None:
    assert decode(watermark.offset, encode(watermark)) == watermark


@given(runs(), st.integers(0, 200))
def test_a_shortened_commit_claims_nothing_that_is_not_finished(watermark: Watermark, limit: int) -> None:
    text = encode(watermark, limit)
    assert len(text) <= limit
    kept = decode(watermark.offset, text).finished
    assert kept == watermark.finished[: len(kept)]


@given(st.text(max_size=30), st.integers(0, 2**50))
def test_any_metadata_can_be_read(text: str, offset: int) -> None:
    assert decode(offset, text).offset == offset


def covered(watermark: Watermark) -> set[int]:
    return set(range(watermark.offset)) | {
        offset for start, stop in watermark.finished for offset in range(start, stop)
    }


@given(offsets, st.data())
def test_a_mark_covers_exactly_what_is_finished(log: list[int], data: st.DataObject) -> None:
    tracker, finished = OffsetTracker(Watermark(0)), set[int]()
    for offset in log:
        assert tracker.begin(offset)
    for offset in data.draw(st.permutations(log)):
        tracker.finish(offset)
        finished.add(offset)
        assert covered(tracker.watermark()) & set(log) == finished
    assert tracker.watermark() == Watermark(log[-1] + 1 if log else 0)


@given(offsets, st.data())
def test_over_any_number_of_crashes_every_record_is_handled_and_no_committed_one_again(
    log: list[int], data: st.DataObject
) -> None:
    committed, handled = Watermark(0), set[int]()
    for _ in range(data.draw(st.integers(1, 4))):
        tracker, running = OffsetTracker(decode(committed.offset, encode(committed))), list[int]()
        known = covered(committed)
        seen = [offset for offset in log if offset >= tracker.position]
        for offset in seen[: data.draw(st.integers(0, len(seen)))]:
            begun = tracker.begin(offset)
            assert begun == (offset not in known)
            running += [offset] if begun else []
        for offset in data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []:
            tracker.finish(offset)
            handled.add(offset)
        committed = tracker.watermark()
        assert covered(committed) & set(log) <= handled
    last = OffsetTracker(committed)
    handled |= {offset for offset in log if offset >= last.position and last.begin(offset)}
    assert handled == set(log)
