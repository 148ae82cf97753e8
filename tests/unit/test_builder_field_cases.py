"""What goes wrong in the field with prefixes, templates, masks and sub-agents, as inputs and right outputs.

900 turn start, 901 turn end, 902 newline, 903 user, 904 assistant, 905 tool, 910/911 think.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.models import CallKind, CallStatus, PolicySpan, PolicyVersion, Trajectory, VersionRun
from rollmill.testing.samples.sessions import assistant, choice, completion, session_of, user
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder

ASK = [user("?")]
P = [900, 903, 31, 901, 902, 900, 904]
NEXT = [902, 900, 905, 31, 901, 902, 900, 904]


def built(*records: Any, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def sampled(trajectory: Trajectory) -> list[list[int]]:
    """The trained tokens of each trace."""
    return [trace.response_ids[trace.loss_mask == 1].tolist() for trace in trajectory.traces]


def reasons(trajectory: Trajectory) -> list[str | None]:
    return [trace.metadata["break_reason"] for trace in trajectory.traces]


def two_turns(reply: list[int], history: list[int], *, message: Any, copy: Any, **more: Any) -> Trajectory:
    """A call, and a next one with a prompt that holds ``history`` where the reply should be."""
    first = completion("c1", P, choice(reply, message=message, **more), at=1.0, messages=ASK)
    second = completion("c2", [*P, *history], [22, 901], at=2.0, messages=[*ASK, copy, user("2?")], text="b")
    return built(first, second)


def test_b028_two_token_forms_of_one_text_without_an_end_of_turn() -> None:
    trajectory = built(
        completion("c1", [1, 2], [53122, 316], at=1.0), completion("c2", [1, 2, 393, 30002, 5], [6], at=2.0)
    )
    assert sampled(trajectory) == [[53122, 316], [6]]
    assert trajectory.traces[1].prompt_ids.tolist() == [1, 2, 393, 30002, 5]
    assert trajectory.traces[1].metadata["break_at"] == 2


def test_b030_the_whole_history_is_the_prefix_not_the_last_step() -> None:
    trajectory = built(
        completion("c1", [1], [2], at=1.0),
        completion("c2", [1, 2, 3], [4], at=2.0),
        completion("c3", [1, 2, 3, 4, 5], [6], at=3.0),
    )
    (trace,) = trajectory.traces
    assert trace.response_ids.tolist() == [2, 3, 4, 5, 6]
    assert trace.loss_mask.tolist() == [1, 0, 1, 0, 1]


def test_b031_the_templates_newline_is_context() -> None:
    trajectory = built(
        completion("c1", P, [21, 901], at=1.0), completion("c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0)
    )
    (trace,) = trajectory.traces
    assert trace.response_ids.tolist() == [21, 901, *NEXT, 22, 901]
    assert sampled(trajectory) == [[21, 901, 22, 901]]


# B032
def test_b032a_an_end_token_that_is_gone_from_history_is_a_break() -> None:
    trajectory = two_turns([21, 901], [21, *NEXT], message=assistant("a"), copy=assistant("a"))
    assert sampled(trajectory) == [[21, 901], [22, 901]]


def test_b032a_an_end_token_that_is_gone_after_a_rewritten_reply_is_a_break() -> None:
    trajectory = two_turns([5, 6, 901], [8, *NEXT], message=assistant("a"), copy=assistant("a"))
    assert reasons(trajectory) == [None, "end_of_turn_missing"]


def test_b032b_an_end_token_after_a_truncated_reply_is_context() -> None:
    first = completion("c1", P, [21], at=1.0, finish="length")
    trajectory = built(first, completion("c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0))
    assert sampled(trajectory) == [[21, 22, 901]]


def test_b032c_an_end_token_repeated_by_the_template_is_context_and_flagged() -> None:
    trajectory = built(
        completion("c1", P, [21, 901], at=1.0), completion("c2", [*P, 21, 901, 901, *NEXT], [22, 901], at=2.0)
    )
    assert sampled(trajectory) == [[21, 901, 22, 901]]
    assert trajectory.traces[0].metadata["duplicate_end_tokens"] == 1


def test_b036_rewritten_tool_arguments_are_a_break_of_their_own() -> None:
    trajectory = two_turns(
        [60, 61, 62, 901],
        [63, 64, 901, *NEXT],
        message=assistant("", tool_calls=[{"function": {"name": "edit", "arguments": '{"path": "a", "edits": [1]}'}}]),
        copy=assistant("", tool_calls=[{"function": {"name": "edit", "arguments": '{"edits":[1],"path":"a"}'}}]),
    )
    assert sampled(trajectory) == [[60, 61, 62, 901], [22, 901]]
    assert reasons(trajectory) == [None, "tool_arguments"]


def test_b037_breaks_at_every_turn_are_all_kept_and_show_in_the_ratio() -> None:
    records = [completion(f"c{turn:02d}", [1, *([7] * turn), 8], [5, 9], at=1.0 + turn) for turn in range(48)]
    trajectory = built(*records)
    assert len(trajectory.traces) == 48
    assert trajectory.metadata["merge_ratio"] == 1.0
    assert trajectory.trained_tokens == 96


def test_b038_an_empty_think_block_added_by_the_template_is_a_break() -> None:
    prompt = [151644, 872, 198, 4340, 525, 498, 30, 151645, 198, 151644, 77091, 198]
    history = [151667, 271, 151668, 271, 40, 151645, 198, 151644, 872, 198, 40, 151645, 198, 151644, 77091, 198]
    first = completion("c1", prompt, [40, 151645], at=1.0, messages=ASK, text="I")
    second = completion("c2", prompt + history, [41, 151645], at=2.0, messages=[*ASK, assistant("I"), user("I")])
    trajectory = built(first, second)
    assert sampled(trajectory) == [[40, 151645], [41, 151645]]
    assert reasons(trajectory) == [None, "scaffold_inserted"]
    assert trajectory.traces[1].metadata["break_at"] == 12


@pytest.mark.parametrize(
    ("message", "copy"),
    [
        (assistant("a", reasoning_content="need"), assistant("a", reasoning_content="need")),
        (assistant("a", reasoning_content="need"), assistant("a")),
        (assistant("<think>need</think>a"), assistant("a")),
    ],
)
def test_b039_thinking_stripped_from_history_is_a_break(message: Any, copy: Any) -> None:
    trajectory = two_turns([910, 31, 911, 21, 901], [21, 901, *NEXT], message=message, copy=copy)
    assert sampled(trajectory) == [[910, 31, 911, 21, 901], [22, 901]]
    assert reasons(trajectory) == [None, "reasoning_stripped"]


def test_a_reply_that_a_stop_string_ended_is_not_repaired() -> None:
    trajectory = two_turns(
        [21, 23, 24], [25, 901, *NEXT], message=assistant("a"), copy=assistant("a"), stop_reason="</tool>"
    )
    assert reasons(trajectory) == [None, "stop_string"]


def test_a_stop_string_is_no_evidence_for_the_end_of_turn() -> None:
    first = completion("c1", P, choice([21, 23, 5], stop_reason="x", message=assistant("a")), at=1.0, messages=ASK)
    cut = completion("c2", [1], [6, 6], at=2.0, finish="length", messages=ASK, text="cut")
    after = completion("c3", [1, 7, 5, 3], [6], at=3.0, finish="length", messages=[*ASK, assistant("cut")])
    assert reasons(built(first, cut, after)) == [None, "compaction", "end_of_turn_unknown"]


def test_an_end_token_inside_the_reply_is_not_taken_for_its_end() -> None:
    trajectory = two_turns([5, 901, 6, 7, 901], [5, 901, 8, 901, *NEXT], message=assistant("a"), copy=assistant("a"))
    (trace,) = trajectory.traces
    assert trace.response_ids.tolist() == [5, 901, 6, 7, 901, *NEXT, 22, 901]


def test_an_end_token_inside_the_rewritten_part_is_too_doubtful_to_repair() -> None:
    trajectory = two_turns([5, 6, 901, 7, 901], [8, 901, 7, 901, *NEXT], message=assistant("a"), copy=assistant("a"))
    assert reasons(trajectory) == [None, "end_of_turn_ambiguous"]


def test_b075_a_resumed_call_keeps_its_versions() -> None:
    old, new = PolicyVersion(0, 1), PolicyVersion(0, 2)
    first = completion("c1", P, choice([21, 22, 901], versions=[[old, 2], [new, 1]]), at=1.0)
    second = completion("c2", [*P, 21, 22, 901, 902], [23, 901], at=2.0, policy=PolicySpan(before=new, after=new))
    (trace,) = built(first, second).traces
    assert trace.versions == (VersionRun(old, 2), VersionRun(new, 1), VersionRun(None, 1), VersionRun(new, 2))
    assert trace.versions_trained == {old: 2, new: 3}
    assert trace.oldest_version == old


def test_a_change_of_policy_is_a_break() -> None:
    first = completion("c1", P, [21, 901], at=1.0)
    second = completion("c2", [*P, 21, 901, 902], [22, 901], at=2.0, policy=PolicySpan(name="other"))
    trajectory = built(first, second)
    assert reasons(trajectory) == [None, "policy_changed"]
    assert [trace.metadata["policy"] for trace in trajectory.traces] == ["policy", "other"]


def test_a_change_of_fingerprint_is_a_break() -> None:
    first = completion("c1", P, [21, 901], at=1.0, fingerprint="f1")
    second = completion("c2", [*P, 21, 901, 902], [22, 901], at=2.0, fingerprint="f2")
    assert reasons(built(first, second)) == [None, "fingerprint_changed"]


def test_changed_tools_and_system_prompts_have_their_names() -> None:
    system = {"role": "system", "content": "be good"}
    tool = {"type": "function", "function": {"name": "look"}}
    first = completion("c1", [1, 2], [5, 9], at=1.0, messages=[system, *ASK], tools=[tool])
    tools = completion("c2", [1, 3], [6, 9], at=2.0, messages=[system, *ASK])
    other = completion("c3", [4, 3], [7, 9], at=3.0, messages=[{**system, "content": "be bad"}, *ASK])
    assert reasons(built(first, tools, other)) == [None, "tools_changed", "system_changed"]


def test_b042_a_prompt_that_shrinks_while_its_messages_grow_is_named() -> None:
    first = completion("c1", [1, 2, 3, 4], [5, 9], at=1.0, messages=ASK, text="a")
    second = completion("c2", [1, 3], [6, 9], at=2.0, messages=[*ASK, assistant("a"), user("2?")])
    trajectory = built(first, second)
    assert reasons(trajectory) == [None, "history_shrunk"]
    assert trajectory.traces[1].metadata["break_tokens"] == [6, 2]


def test_b048_unknown_logprobs_are_never_trained() -> None:
    first = completion("c1", P, [21, 901], at=1.0, logprobs=[-0.5, -9999.0])
    second = completion("c2", [*P, 21, 901, 902], [22, 901], at=2.0)
    trajectory = built(first, second)
    assert sampled(trajectory) == [[22, 901]]
    assert [(item.reason, item.tokens) for item in trajectory.excluded] == [("logprob_unknown", 2)]


def test_what_cannot_be_trained_is_excluded_by_reason() -> None:
    trajectory = built(
        completion("c1", P, [21, 901], at=1.0, kind=CallKind.AUX),
        completion("c2", P, [21, 22, 901], at=2.0, status=CallStatus.INCOMPLETE),
        completion("c3", P, [21], at=3.0, status=CallStatus.CLIENT_GONE),
        completion("c4", P, None, at=4.0, usage_completion_tokens=7),
        completion("c5", None, [21, 22, 23, 901], at=5.0),
        completion("c6", P, [], at=6.0),
        completion("c7", P, choice([21, 901], trainable=False, untrainable_reason="ids 2 != usage 3"), at=7.0),
        completion("c8", [4], None, at=8.0, status=CallStatus.ERROR, usage_completion_tokens=3).replace(choices=()),
    )
    assert {item.reason: item.tokens for item in trajectory.excluded} == {
        "aux": 2,
        "incomplete": 3,
        "client_gone": 1,
        "no_ids": 7,
        "no_prompt_ids": 4,
        "ids": 2,
        "error": 3,
    }
    assert trajectory.trained_tokens == 0
    (trace,) = trajectory.traces
    assert trace.response_logprobs is None


def test_messages_of_a_merged_trace_are_the_whole_conversation() -> None:
    first = completion("c1", P, [21, 901], at=1.0, messages=ASK, text="a")
    second = completion(
        "c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0, messages=[*ASK, assistant("a"), user("2?")], text="b"
    )
    (trace,) = built(first, second).traces
    assert trace.prompt_messages == b'[{"content":"?","role":"user"}]'
    assert trace.response_messages is not None
    assert trace.response_messages.count(b"assistant") == 2
    assert trace.response_messages.index(b"2?") < trace.response_messages.index(b'"b"')


def test_merging_a_long_session_compares_bytes_not_lists() -> None:
    """300 turns in eight interleaved chains of up to 60k tokens: seconds would mean quadratic lists."""
    records, prompts = [], {agent: [agent, *range(10, 1000)] for agent in range(8)}
    for turn in range(300):
        agent = turn % 8
        prompt = prompts[agent]
        records.append(completion(f"c{turn:03d}", prompt, [5, 6, 9], at=1.0 + turn))
        prompts[agent] = [*prompt, 5, 6, 9, *range(20, 1500)]
    trajectory = built(*records)
    assert len(trajectory.traces) == 8
    assert trajectory.metadata["merge_ratio"] == 8 / 300


@pytest.mark.parametrize(
    "strange",
    [
        {"role": "assistant", "content": {"odd": 1}},
        {"role": "assistant", "content": [1, {"type": 2}], "tool_calls": 7},
        {"tool_calls": [3, {"function": "f"}, {"function": {"arguments": {"a": 1}}}]},
        {},
    ],
)
def test_strange_messages_are_compared_not_feared(strange: dict[str, Any]) -> None:
    same = two_turns([6, 7, 901], [8, 901, *NEXT], message={"role": "assistant", **strange}, copy=strange)
    assert len(same.traces) == (1 if "role" in strange else 2)
    assert len(two_turns([6, 7, 901], [8, 901, *NEXT], message=assistant("a"), copy=strange).traces) == 2
