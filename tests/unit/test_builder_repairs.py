"""Cases that generated sessions found: what templates do to replies that the messages carry unchanged, and more."""

from __future__ import annotations

import pytest

from rollmill.codec import decode, encode
from rollmill.models import CompletionRecord, Trajectory
from rollmill.testing.samples.sessions import Message, assistant, choice, completion, session_of, user
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder

ASK = [user("?")]
CALLS = [{"type": "function", "function": {"name": "b", "arguments": ""}}]
END, THINK, UNTHINK = 9, 10, 11


def turns(message: Message, reply: list[int], copy: list[int], finish: str) -> list[CompletionRecord]:
    first = choice(reply, finish=finish, message=message)
    return [
        completion("c1", [1, 2], first, at=1.0, messages=ASK),
        completion("c2", [1, 2, *copy, END, 3], [7, END], at=2.0, messages=[*ASK, message, user("and?")]),
    ]


@pytest.mark.parametrize(
    ("message", "reply", "copy", "finish", "reason"),
    [
        # The template leaves the thought out, and the text is tokenised anew: (a)(b) becomes (ab).
        (assistant("ab", reasoning_content="x"), [THINK, 30, UNTHINK, 5, 6, END], [8], "stop", "reasoning_stripped"),
        # The thought was cut off, and the template closes it.
        (assistant("", reasoning_content="ab"), [THINK, 5, 6], [THINK, 8, UNTHINK], "length", "reasoning_stripped"),
        (
            assistant("", reasoning_content="xab"),
            [THINK, 30, 5, 6],
            [THINK, 30, 8, UNTHINK],
            "length",
            "reply_unverified",
        ),
        # The call was cut off, and the template closes it with token 12.
        (assistant("", tool_calls=CALLS), [4, 5, 6], [4, 8, 12], "length", "reply_unverified"),
    ],
)
def test_a_reply_that_the_template_changes_is_another_trace(
    message: Message, reply: list[int], copy: list[int], finish: str, reason: str
) -> None:
    built = PrefixMergingBuilder(END).build(session_of(*turns(message, reply, copy, finish)))
    assert [trace.metadata["break_reason"] for trace in built.traces] == [None, reason]
    assert [trace.trained_tokens for trace in built.traces] == [len(reply), 2]


@pytest.mark.parametrize(
    ("message", "reply", "copy", "finish"),
    [
        (
            assistant("ab", reasoning_content="xx"),
            [THINK, 30, 30, UNTHINK, 5, 6, END],
            [THINK, 30, 30, UNTHINK, 8],
            "stop",
        ),
        (assistant("ab"), [5, 6], [8], "length"),
        (assistant("", tool_calls=CALLS), [4, 5, 6, 12, END], [4, 8, 12], "tool_calls"),
    ],
)
def test_a_reply_that_the_template_only_tokenises_anew_is_repaired(
    message: Message, reply: list[int], copy: list[int], finish: str
) -> None:
    (trace,) = PrefixMergingBuilder(END).build(session_of(*turns(message, reply, copy, finish))).traces
    assert trace.response_ids[: len(reply)].tolist() == reply
    assert trace.metadata["drift"] == 1


def test_a_trajectory_reads_back_as_it_was_written() -> None:
    first = completion("c1", [1, 2, 3, 4], [5, END], at=1.0, messages=ASK, text="a")
    second = completion("c2", [1, 3], [6, END], at=2.0, messages=[*ASK, assistant("a"), user("2?")])
    built = PrefixMergingBuilder().build(session_of(first, second))
    assert built.traces[1].metadata["break_tokens"] == [6, 2]
    assert decode(Trajectory, encode(built)) == built


def test_a_turn_behind_an_edited_reply_is_no_fork() -> None:
    """The reply to c1 drifted and is repaired; the one to c2 was edited, so c3 goes on from neither."""
    history = [*ASK, assistant("ab"), user("and?")]
    edited = [*history, assistant("x"), user("so?")]
    built = PrefixMergingBuilder().build(
        session_of(
            completion("c1", [1, 2], [5, 6, END], at=1.0, messages=ASK, text="ab"),
            completion("c2", [1, 2, 8, END, 3], [7, END], at=2.0, messages=history, text="g"),
            completion("c3", [1, 2, 8, END, 3, 30, END, 3], [7, 7, END], at=3.0, messages=edited, text="gg"),
        )
    )
    assert [trace.metadata["break_reason"] for trace in built.traces] == [None, "reply_differs"]
    assert built.traces[1].metadata["parent"] == "c1"
