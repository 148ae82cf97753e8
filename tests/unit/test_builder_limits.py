"""The most tokens of a trace, and the three things that can become of a longer one."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.models import CompletionRecord, Trajectory
from rollmill.testing.samples.sessions import completion, session_of
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.outputs import close_counts
from rollmill_builder.sessions.token_accounting import account_tokens

COUNT = 5


def turns(count: int = COUNT, **more: Any) -> list[CompletionRecord]:
    """Prompts of 2, 6, 10, … tokens; each reply has 3, and one token comes between."""
    records, prompt = [], [1, 2]
    for turn in range(count):
        reply = [10 + turn, 11 + turn, 9]
        records.append(completion(f"c{turn}", prompt, reply, at=1.0 + turn, **more))
        prompt = [*prompt, *reply, 3]
    return records


def built(records: list[CompletionRecord], **config: Any) -> Trajectory:
    trajectory = PrefixMergingBuilder(**config).build(session_of(*records))
    assert account_tokens(session_of(*records), trajectory) == trajectory
    most = config["max_trace_tokens"]
    assert all(len(trace.prompt_ids) + len(trace.response_ids) <= most for trace in trajectory.traces)
    return trajectory


def kept(trajectory: Trajectory) -> list[list[str]]:
    return [[turn.completion_id for turn in trace.turns] for trace in trajectory.traces]


def excluded(trajectory: Trajectory) -> dict[str, int]:
    return {item.reason: item.tokens for item in trajectory.excluded}


@pytest.mark.parametrize("policy", ["cut", "split", "exclude"])
def test_a_trace_that_just_fits_is_left_alone(policy: str) -> None:
    trajectory = built(turns(), max_trace_tokens=2 + COUNT * 4 - 1, over_long=policy)
    assert kept(trajectory) == [[f"c{turn}" for turn in range(COUNT)]]
    assert trajectory.excluded == ()


def test_b089_a_limit_holds_for_the_merged_response_and_not_for_each_reply() -> None:
    """Three replies of three tokens, and two tokens of a tool before the next."""
    records, prompt = [], [1, 2]
    for turn in range(3):
        reply = [10 + turn, 20 + turn, 9]
        records.append(completion(f"c{turn}", prompt, reply, at=1.0 + turn))
        prompt = [*prompt, *reply, 3, 4]
    (trace,) = built(records, max_trace_tokens=32).traces
    assert trace.response_ids.tolist() == [10, 20, 9, 3, 4, 11, 21, 9, 3, 4, 12, 22, 9]
    assert trace.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]


def test_cut_keeps_the_turns_that_fit() -> None:
    trajectory = built(turns(), max_trace_tokens=14)
    (trace,) = trajectory.traces
    assert kept(trajectory) == [["c0", "c1", "c2"]]
    assert trace.response_ids.tolist() == [10, 11, 9, 3, 11, 12, 9, 3, 12, 13, 9]
    assert trace.metadata["over_long"] == 2
    assert excluded(trajectory) == {"over_long": 6}
    assert trajectory.metadata["left_out"] == {"over_long": 2}
    assert close_counts(trajectory)["replies_cut"] == 2
    assert close_counts(trajectory)["excluded_over_long"] == 6


def test_cut_leaves_nothing_of_a_trace_whose_first_turn_is_too_long() -> None:
    trajectory = built(turns(), max_trace_tokens=4)
    assert trajectory.traces == ()
    assert excluded(trajectory) == {"over_long": 3 * COUNT}


def test_exclude_keeps_nothing_of_what_is_too_long() -> None:
    short = completion("d", [7], [8, 9], at=9.0)
    trajectory = built([*turns(), short], max_trace_tokens=14, over_long="exclude")
    assert kept(trajectory) == [["d"]]
    assert excluded(trajectory) == {"over_long": 3 * COUNT}


def test_split_trains_every_reply_and_says_what_context_is_missing() -> None:
    trajectory = built(turns(), max_trace_tokens=14, over_long="split")
    first, second = trajectory.traces
    assert kept(trajectory) == [["c0", "c1", "c2"], ["c3", "c4"]]
    assert second.prompt_ids.tolist() == [3, 11, 12, 9, 3, 12, 13, 9, 3][-7:]
    assert second.response_ids.tolist() == [13, 14, 9, 3, 14, 15, 9]
    assert second.metadata["context_dropped"] == 14 - 7
    assert second.metadata["break_reason"] == "over_long"
    assert (second.metadata["parent"], second.metadata["parent_branch"]) == ("c2", first.metadata["branch"])
    assert trajectory.excluded == ()
    assert close_counts(trajectory)["traces_split"] == 1


def test_split_leaves_out_a_reply_that_fits_nowhere() -> None:
    long = completion("long", [1, 2], [*range(10, 29), 9], at=1.0)
    after = completion("next", [1, 2, *range(10, 29), 9, 3], [5, 9], at=2.0)
    trajectory = built([long, after], max_trace_tokens=20, over_long="split")
    assert kept(trajectory) == [["next"]]
    assert excluded(trajectory) == {"over_long": 20}
    assert trajectory.traces[0].metadata["context_dropped"] == 23 - 10


def test_turns_that_are_never_trained_count_as_context() -> None:
    records = turns()
    records[1] = completion("c1", records[1].prompt_ids.tolist(), [11, 12, 9], at=2.0, logprobs=None)  # type: ignore[union-attr]  # it has some
    trajectory = built(records, max_trace_tokens=14)
    assert kept(trajectory) == [["c0", "c1", "c2"]]
    assert excluded(trajectory) == {"no_logprobs": 3, "over_long": 6}


@pytest.mark.parametrize(("policy", "traces"), [("cut", 2), ("exclude", 2), ("split", 3)])
def test_per_request_has_the_same_limit(policy: Any, traces: int) -> None:
    trajectory = PerRequestBuilder(max_trace_tokens=9, over_long=policy).build(session_of(*turns(3)))
    assert len(trajectory.traces) == traces
    assert excluded(trajectory) == ({} if policy == "split" else {"over_long": 3})


def test_branches_are_limited_one_by_one() -> None:
    fork = completion("f", [1, 2, 10, 11, 9, 4], [6, 9], at=20.0)
    trajectory = built([*turns(), fork], max_trace_tokens=14)
    assert kept(trajectory) == [["c0", "c1", "c2"], ["f"]]
    assert trajectory.traces[1].metadata["parent"] == "c0"


@pytest.mark.parametrize(
    "config",
    [{"max_trace_tokens": 1}, {"max_trace_tokens": True}, {"over_long": "truncate"}, {"max_trace_tokens": "9"}],
)
@pytest.mark.parametrize("builder", [PrefixMergingBuilder, PerRequestBuilder])
def test_limits_are_checked(builder: Any, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        builder(**config)
