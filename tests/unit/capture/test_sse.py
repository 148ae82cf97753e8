"""The event-stream parser, by the letter of its standard."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill_capture.sse import MAX_EVENT, Comment, EventParser, EventTooLargeError, ServerEvent


def parse(*chunks: bytes) -> list[ServerEvent | Comment]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_counts(end: bytes) -> None:
    assert parse(b"data: a" + end + b"data:b" + end + end) == [ServerEvent(b"a\nb")]


def test_an_event_has_a_name_and_blocks_without_data_are_no_events() -> None:
    assert parse(b"event: ping\ndata:\n\nretry: 5\n\nid: 1\n\nevent: x\ndata: 1\n\n") == [ServerEvent(b"1", "x")]


def test_only_one_space_is_taken_and_a_field_without_colon_is_empty() -> None:
    assert parse(b"data:  two\n\ndata\n\n") == [ServerEvent(b" two")]


def test_comments_are_told() -> None:
    assert parse(b": hi\n\n:\n\n") == [Comment(), Comment()]


def test_a_byte_order_mark_is_no_part_of_the_first_field() -> None:
    assert parse(b"\xef\xbb", b"\xbfdata: a\n\n") == [ServerEvent(b"a")]


def test_an_unfinished_event_is_not_dispatched() -> None:
    assert parse(b"data: a\n") == []


def test_an_event_without_end_is_refused() -> None:
    half = b"data: " + b"x" * (MAX_EVENT // 2)
    with pytest.raises(EventTooLargeError):
        parse(half, half, half)


STREAM = "event: a\r\ndata: süß 😀\r\n\r\n: c\n\ndata: 1\rdata: 2\r\rid: 3\n\ndata: ende\n\n".encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_cuts_anywhere_change_nothing(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[low:high] for low, high in pairwise(places))) == parse(STREAM)
    assert [event for event in parse(STREAM) if isinstance(event, ServerEvent)] == [
        ServerEvent("süß 😀".encode(), "a"),
        ServerEvent(b"1\n2"),
        ServerEvent(b"ende"),
    ]
