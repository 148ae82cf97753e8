"""Random orders of finishing, random crashes: nothing is lost, nothing finished is repeated, commits never lie."""

from hypothesis import given
from hypothesis import strategies as st

from rollmill_evaluator.consumer.watermark import Mark, Progress, decode, encode

offsets = st.lists(st.integers(0, 60), unique=True, max_size=25).map(sorted)


@st.composite
def runs(draw: st.DrawFn) -> Mark:
    """Any mark: ascending, disjoint, not touching."""
    steps = draw(st.lists(st.integers(1, 2**40), max_size=20))
    at = draw(st.integers(0, 2**50))
    mark, ranges = at, []
    for gap, length in zip(steps[::2], steps[1::2], strict=False):
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return Mark(mark, tuple(ranges))


@given(runs())
def test_a_commit_reads_back_as_it_was_written(mark: Mark) -> None:
    assert decode(mark.offset, encode(mark)) == mark


@given(runs(), st.integers(0, 200))
def test_a_shortened_commit_claims_nothing_that_is_not_finished(mark: Mark, limit: int) -> None:
    text = encode(mark, limit)
    assert len(text) <= limit
    kept = decode(mark.offset, text).finished
    assert kept == mark.finished[: len(kept)]


@given(st.text(max_size=30), st.integers(0, 2**50))
def test_any_metadata_can_be_read(text: str, offset: int) -> None:
    assert decode(offset, text).offset == offset


def covered(mark: Mark) -> set[int]:
    return set(range(mark.offset)) | {offset for start, stop in mark.finished for offset in range(start, stop)}


@given(offsets, st.data())
def test_a_mark_covers_exactly_what_is_finished(log: list[int], data: st.DataObject) -> None:
    progress, finished = Progress(Mark(0)), set[int]()
    for offset in log:
        assert progress.begin(offset)
    for offset in data.draw(st.permutations(log)):
        progress.finish(offset)
        finished.add(offset)
        assert covered(progress.mark()) & set(log) == finished
    assert progress.mark() == Mark(log[-1] + 1 if log else 0)


@given(offsets, st.data())
def test_over_any_number_of_crashes_every_record_is_handled_and_no_committed_one_again(
    log: list[int], data: st.DataObject
) -> None:
    committed, handled = Mark(0), set[int]()
    for _ in range(data.draw(st.integers(1, 4))):
        progress, running = Progress(decode(committed.offset, encode(committed))), list[int]()
        known = covered(committed)
        seen = [offset for offset in log if offset >= progress.position]
        for offset in seen[: data.draw(st.integers(0, len(seen)))]:
            begun = progress.begin(offset)
            assert begun == (offset not in known)
            running += [offset] if begun else []
        for offset in data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []:
            progress.finish(offset)
            handled.add(offset)
        committed = progress.mark()
        assert covered(committed) & set(log) <= handled
    last = Progress(committed)
    handled |= {offset for offset in log if offset >= last.position and last.begin(offset)}
    assert handled == set(log)
