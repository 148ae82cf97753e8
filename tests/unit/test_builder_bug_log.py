"""More rows of the field's bug log, by their ids, as far as they concern what the builder makes of records."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rollmill.codec import JSON, MSGPACK, decode, encode
from rollmill.models import CallKind, PolicySpan, PolicyVersion, Trajectory, TrajectoryStatus, VersionRun
from rollmill.testing.samples.sessions import assistant, choice, completion, session_of, user
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.outputs import close_counts

ASK = [user("?")]
P = [900, 903, 31, 901, 902, 900, 904]
TOOLS_TURN = [900, 903, 902, 950, 31, 951, 902, 950, 32, 951, 901, 902, 900, 904]
NEXT = [902, 900, 905, 31, 901, 902, 900, 904]


def built(*records: Any, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def sampled(trajectory: Trajectory) -> list[list[int]]:
    return [trace.response_ids[trace.loss_mask == 1].tolist() for trace in trajectory.traces]


def excluded(trajectory: Trajectory) -> dict[str, int]:
    return {item.reason: item.tokens for item in trajectory.excluded}


def test_b027_a_turn_whose_tool_call_could_not_be_parsed_is_trained_by_its_ids() -> None:
    broken = assistant('<tool_call>{"name": "A", "arguments": {</tool_call>')
    trajectory = built(completion("c1", P, choice([912, 60, 913, 901], message=broken), at=1.0, messages=ASK))
    assert sampled(trajectory) == [[912, 60, 913, 901]]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("prompt_mismatch: sent 3, served 2", "prompt_mismatch"),  # B033
        ("id_missing_at 1", "id_missing_at"),  # B047
        ("logprob_unknown_at 1", "logprob_unknown_at"),  # B048
        ("ids 3 != usage 9", "ids"),  # B001
    ],
)
def test_b033_b047_what_capture_found_untrainable_is_context_with_its_reason(reason: str, code: str) -> None:
    first = completion("c1", P, choice([21, 901], trainable=False, untrainable_reason=reason), at=1.0)
    trajectory = built(first, completion("c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0))
    (trace,) = trajectory.traces
    assert sampled(trajectory) == [[22, 901]]
    assert [turn.reason for turn in trace.turns] == [code, None]
    assert excluded(trajectory) == {code: 2}
    assert close_counts(trajectory)[f"excluded_{code}"] == 2


def test_b040_what_the_engine_rendered_between_two_replies_is_the_context_token_by_token() -> None:
    second = completion("c2", [*P, 21, 901, 902, *TOOLS_TURN], [22, 901], at=2.0)
    (trace,) = built(completion("c1", P, [21, 901], at=1.0), second).traces
    assert trace.response_ids.tolist() == [21, 901, 902, *TOOLS_TURN, 22, 901]
    assert trace.loss_mask[2:-2].tolist() == [0] * (1 + len(TOOLS_TURN))


def test_b041_of_an_assistants_turn_only_what_was_sampled_is_trained() -> None:
    """Neither its header nor the newline after its end; nothing of a turn of text that no engine gave ids for."""
    turn = [900, 904, 902, 21, 901, 902]
    first = completion("c1", turn[:3], [21, 901], at=1.0)
    second = completion("c2", [*turn, 900, 904, 902], [22, 901], at=2.0)
    (trace,) = built(first, second).traces
    assert [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] == [*turn, 900, 904, 902, 22, 901]
    assert [*[0] * len(trace.prompt_ids), *trace.loss_mask.tolist()] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    imported = built(completion("c1", turn[:3], None, at=1.0, text="a"), second)
    assert sampled(imported) == [[22, 901]]
    assert imported.metadata["left_out"] == {"no_ids": 1}


def test_b044_b053_versions_cover_every_token_and_context_has_none() -> None:
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 4)
    first = completion("c1", [1, 2], [5, 9], at=1.0, policy=PolicySpan(before=old, after=old))
    resumed = choice([6, 7, 9], versions=[[old, 1], [new, 2]])
    second = completion("c2", [1, 2, 5, 9, 3], resumed, at=2.0, policy=PolicySpan(before=old, after=new))
    (trace,) = built(first, second).traces
    assert trace.versions == (VersionRun(old, 2), VersionRun(None, 1), VersionRun(old, 1), VersionRun(new, 2))
    assert len(trace.response_ids) == len(trace.loss_mask) == sum(run.length for run in trace.versions)
    assert (trace.oldest_version, max(trace.versions_trained)) == (old, new)
    assert len(trace.prompt_ids) == 2
    assert [unit.version for unit in trace.units()] == [old, old, new]


def test_b045_of_two_tries_of_a_call_the_one_that_was_gone_on_with_is_merged() -> None:
    trajectory = built(
        completion("c1", P, [5, 6], at=1.0, finish="abort"),
        completion("c2", P, [7, 8, 901], at=2.0),
        completion("c3", [*P, 7, 8, 901, *NEXT], [22, 901], at=3.0),
        siblings="exclude",
    )
    assert sampled(trajectory) == [[7, 8, 901, 22, 901]]
    assert excluded(trajectory) == {"sibling": 2}
    assert trajectory.metadata["left_out"] == {"sibling": 1}


def test_b045_a_turn_without_logprobs_is_never_filled() -> None:
    second = completion("c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0, logprobs=None)
    trajectory = built(completion("c1", P, [21, 901], at=1.0), second)
    (trace,) = trajectory.traces
    assert trace.response_logprobs is not None
    assert trace.response_logprobs[-2:].tolist() == [0.0, 0.0]
    assert sampled(trajectory) == [[21, 901]]


def test_b050_what_the_harness_said_in_the_assistants_name_is_context() -> None:
    apology = [900, 904, 71, 72, 901, 902]
    second = completion("c2", [*P, 21, 901, 902, *apology, 900, 904], [22, 901], at=2.0)
    trajectory = built(completion("c1", P, [21, 901], at=1.0), second)
    assert sampled(trajectory) == [[21, 901, 22, 901]]
    assert 0 not in trajectory.traces[0].response_ids


@pytest.mark.parametrize("builder", [PrefixMergingBuilder(), PerRequestBuilder()])
def test_b050_b057_b058_a_session_without_a_call_gives_no_token(
    builder: PrefixMergingBuilder | PerRequestBuilder,
) -> None:
    trajectory = builder.build(session_of())
    assert (trajectory.status, trajectory.error) == (TrajectoryStatus.ERROR, "no completions")
    assert (trajectory.traces, trajectory.excluded) == ((), ())


def test_b055_interleaved_agents_are_a_trace_each() -> None:
    trajectory = built(
        completion("a1", [1, 2], [5, 9], at=1.0),
        completion("b1", [50, 2], [6, 9], at=2.0),
        completion("a2", [1, 2, 5, 9, 3], [7, 9], at=3.0),
        completion("b2", [50, 2, 6, 9, 3], [8, 9], at=4.0),
    )
    assert sampled(trajectory) == [[5, 9, 7, 9], [6, 9, 8, 9]]
    assert trajectory.metadata["breaks"] == {"sub_agent": 1}
    caller, agent = (trace.metadata for trace in trajectory.traces)
    assert (agent["began_after"], agent["began_after_branch"]) == ("a1", caller["branch"])
    assert "began_after" not in caller
    assert trajectory.metadata["merge_ratio"] == 0.5


def test_b056_a_side_call_is_excluded_by_its_kind_and_named_by_its_system_prompt() -> None:
    title = {"messages": [{"role": "system", "content": "title"}, *ASK]}
    side = completion("t", [70, 71], [72, 901], at=1.5, messages=title["messages"])
    main = [
        completion("c1", P, [21, 901], at=1.0, messages=ASK, text="a"),
        completion("c2", [*P, 21, 901, *NEXT], [22, 901], at=2.0, messages=[*ASK, assistant("a"), user("2?")]),
    ]
    tagged = built(*main, side.replace(kind=CallKind.AUX))
    assert sampled(tagged) == [[21, 901, 22, 901]]
    assert excluded(tagged) == {"aux": 2}
    untagged = built(*main, side)
    assert sampled(untagged) == [[21, 901, 22, 901], [72, 901]]
    assert untagged.traces[1].metadata["break_reason"] == "sub_agent"


def test_replies_without_a_token_are_counted_with_their_reason() -> None:
    trajectory = built(
        completion("c1", P, [21, 901], at=1.0),
        completion("c2", P, [], at=2.0),
        completion("c3", P, None, at=3.0),
        completion("c4", None, [5], at=4.0),
    )
    assert trajectory.metadata["left_out"] == {"empty_reply": 1, "no_ids": 1, "no_prompt_ids": 1}
    assert trajectory.metadata["records"] == 4


def test_sessions_that_never_merge_are_counted() -> None:
    apart = built(completion("c1", [1, 2], [5, 9], at=1.0), completion("c2", [1, 3], [6, 9], at=2.0))
    assert close_counts(apart)["sessions_unmerged"] == 1
    assert close_counts(apart)["break_compaction"] == 1
    assert "sessions_unmerged" not in close_counts(built(completion("c1", [1, 2], [5, 9], at=1.0)))


def test_a_compaction_without_tools_is_named_by_the_tools() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    first = completion("c1", [1, 2], [5, 9], at=1.0, messages=ASK, tools=[tool], text="a")
    second = completion("c2", [1, 3, 2, 5, 9, 4], [6, 9], at=2.0, messages=[*ASK, assistant("a"), user("sum up")])
    trajectory = built(first, second)
    assert [trace.metadata["break_reason"] for trace in trajectory.traces] == [None, "tools_changed"]
    assert sampled(trajectory) == [[5, 9], [6, 9]]


def test_changed_tools_lose_no_token_of_the_parent() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    history = [*ASK, assistant("a"), user("2?")]
    first = completion("c1", [1, 2], [5, 9], at=1.0, messages=ASK, text="a")
    second = completion("c2", [1, 2, 5, 9, 3], [6, 9], at=2.0, messages=history, tools=[tool])
    trajectory = built(first, second)
    assert sampled(trajectory) == [[5, 9], [6, 9]]
    assert trajectory.traces[1].metadata["parent"] == "c1"
    assert trajectory.traces[1].metadata["break_reason"] == "tools_changed"
    assert trajectory.traces[1].metadata["break_from"] == "c1"


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("as_text", [True, False])
def test_b098_arguments_of_tools_keep_their_own_keys_and_get_no_others(content_type: str, *, as_text: bool) -> None:
    given = [{"x": 1}, {"y": 2}, {}]
    written = [orjson.dumps(one).decode() if as_text else one for one in given]
    calls = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in written]
    trajectory = built(completion("c1", P, [21, 901], at=1.0, messages=[*ASK, assistant("", tool_calls=calls)]))
    (trace,) = decode(Trajectory, encode(trajectory, content_type)).traces
    read = orjson.loads(trace.prompt_messages)[-1]["tool_calls"]
    assert [call["function"]["arguments"] for call in read] == written
