"""The twelve cases (T1 to T9, T12; T10 and T11 belong to the merger), every value exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmill.models import CompletionRecord, EvalResult, Trace, Trajectory, TrajectoryStatus
from rollmill.testing.samples.sessions import assistant, choice, completion, session_of, user
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder

ASK = [user("?")]
T1_RESPONSE = [5, 6, 9, 3, 4, 7, 9]
T1_MASK = [1, 1, 1, 0, 0, 1, 1]
T1_LOGPROBS = [-0.1, -0.2, -0.3, 0, 0, -0.4, -0.5]


def built(*records: CompletionRecord, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def shape(trace: Trace) -> tuple[list[int], list[int], list[int]]:
    return trace.prompt_ids.tolist(), trace.response_ids.tolist(), trace.loss_mask.tolist()


def shapes(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[int]]]:
    return [shape(trace) for trace in trajectory.traces]


def kept(trace: Trace) -> list[str]:
    return [turn.completion_id for turn in trace.turns]


def reasons(trajectory: Trajectory) -> list[str | None]:
    return [trace.metadata["break_reason"] for trace in trajectory.traces]


def excluded(trajectory: Trajectory) -> dict[str, int]:
    return {item.reason: item.tokens for item in trajectory.excluded}


def c1(**more: Any) -> CompletionRecord:
    given = {"at": 1.0, "logprobs": [-0.1, -0.2, -0.3], **more}
    return completion("c1", [1, 2], [5, 6, 9], messages=ASK, text="ab", **given)


def c2(prompt: list[int], *, reply_in_history: str = "ab", **more: Any) -> CompletionRecord:
    history = [*ASK, assistant(reply_in_history), user("and?")]
    given = {"logprobs": [-0.4, -0.5], "messages": history, **more}
    return completion("c2", prompt, [7, 9], at=2.0, text="g", **given)


@pytest.mark.parametrize("backwards", [False, True])
def test_t1_linear_merge(backwards: bool) -> None:
    records = [c1(), c2([1, 2, 5, 6, 9, 3, 4])]
    trajectory = built(*(reversed(records) if backwards else records))
    (trace,) = trajectory.traces
    assert shape(trace) == ([1, 2], T1_RESPONSE, T1_MASK)
    assert trace.response_logprobs is not None
    np.testing.assert_array_equal(trace.response_logprobs, np.array(T1_LOGPROBS, dtype=np.float32))
    assert kept(trace) == ["c1", "c2"]
    assert trajectory.excluded == ()


@pytest.mark.parametrize("config", [{}, {"end_of_turn_token_id": 9}, {"on_drift": "fork_over_n", "drift_tokens": 2}])
def test_t2_retokenised_reply_is_repaired(config: dict[str, Any]) -> None:
    trajectory = built(c1(), c2([1, 2, 8, 9, 3, 4]), **config)
    (trace,) = trajectory.traces
    assert shape(trace) == ([1, 2], T1_RESPONSE, T1_MASK)
    assert trace.metadata["drift"] == trajectory.metadata["drift"] == 1
    assert [turn.context_exact for turn in trace.turns] == [False, True]


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"on_drift": "fork"}, "drift"), ({"on_drift": "fork_over_n", "drift_tokens": 1}, "drift_over_n")],
)
def test_t2_forks_where_repair_is_not_wanted(config: dict[str, Any], reason: str) -> None:
    trajectory = built(c1(), c2([1, 2, 8, 9, 3, 4]), **config)
    assert shapes(trajectory) == [([1, 2], [5, 6, 9], [1, 1, 1]), ([1, 2, 8, 9, 3, 4], [7, 9], [1, 1])]
    assert reasons(trajectory) == [None, reason]


def test_t2_forks_where_nothing_says_that_the_reply_is_the_same() -> None:
    trajectory = built(c1(), c2([1, 2, 8, 9, 3, 4], messages=None))
    assert len(trajectory.traces) == 2
    assert reasons(trajectory) == [None, "reply_unverified"]
    assert trajectory.traces[1].metadata["break_at"] == 2


def test_t3_length_truncated_turn() -> None:
    first = completion("c1", [1, 2], [5, 6], at=1.0, finish="length")
    second = completion("c2", [1, 2, 5, 6, 9, 3], [7, 9], at=2.0)
    assert shapes(built(first, second, end_of_turn_token_id=9)) == [([1, 2], [5, 6, 9, 3, 7, 9], [1, 1, 0, 0, 1, 1])]


def test_t3_with_drift_keeps_the_templates_end_of_turn_as_context() -> None:
    first = completion("c1", [1, 2], [5, 6], at=1.0, finish="length", messages=ASK, text="ab")
    trajectory = built(first, c2([1, 2, 8, 9, 3]))
    assert shapes(trajectory) == [([1, 2], [5, 6, 9, 3, 7, 9], [1, 1, 0, 0, 1, 1])]


def test_t4_interleaved_sub_agents() -> None:
    trajectory = built(
        completion("a1", [1, 2], [5, 9], at=1.0),
        completion("b1", [1, 3], [6, 9], at=2.0),
        completion("a2", [1, 2, 5, 9, 4], [7, 9], at=3.0),
        completion("b2", [1, 3, 6, 9, 4], [8, 9], at=4.0),
    )
    assert shapes(trajectory) == [
        ([1, 2], [5, 9, 4, 7, 9], [1, 1, 0, 1, 1]),
        ([1, 3], [6, 9, 4, 8, 9], [1, 1, 0, 1, 1]),
    ]
    assert reasons(trajectory) == [None, "sub_agent"]


def test_t5_compaction() -> None:
    trajectory = built(
        completion("c1", [1, 2], [5, 9], at=1.0),
        completion("c2", [1, 2, 5, 9, 3], [6, 9], at=2.0),
        completion("c3", [1, 20], [7, 9], at=3.0),
        completion("c4", [1, 20, 7, 9, 3], [8, 9], at=4.0),
    )
    assert shapes(trajectory) == [
        ([1, 2], [5, 9, 3, 6, 9], [1, 1, 0, 1, 1]),
        ([1, 20], [7, 9, 3, 8, 9], [1, 1, 0, 1, 1]),
    ]
    assert reasons(trajectory) == [None, "compaction"]


def test_t6_fork() -> None:
    trajectory = built(
        completion("c1", [1, 2], [5, 9], at=1.0),
        completion("x", [1, 2, 5, 9, 3], [6, 9], at=2.0),
        completion("y", [1, 2, 5, 9, 4], [7, 9], at=3.0),
    )
    assert shapes(trajectory) == [
        ([1, 2], [5, 9, 3, 6, 9], [1, 1, 0, 1, 1]),
        ([1, 2, 5, 9, 4], [7, 9], [1, 1]),
    ]
    first, second = trajectory.traces
    assert second.metadata["break_reason"] == "fork"
    assert second.metadata["parent"] == "c1"
    assert second.metadata["parent_branch"] == first.metadata["branch"] != second.metadata["branch"]


def retried() -> list[CompletionRecord]:
    return [
        completion("c1", [1, 2], [5, 9], at=1.0),
        completion("c1b", [1, 2], [6, 9], at=2.0),
        completion("c2", [1, 2, 6, 9, 3], [7, 9], at=3.0),
    ]


def test_t7_retry_is_a_sibling_trace() -> None:
    trajectory = built(*retried())
    assert shapes(trajectory) == [([1, 2], [5, 9], [1, 1]), ([1, 2], [6, 9, 3, 7, 9], [1, 1, 0, 1, 1])]
    assert kept(trajectory.traces[1]) == ["c1b", "c2"]
    assert reasons(trajectory)[0] == "sibling"
    assert trajectory.excluded == ()


def test_t7_retry_is_excluded_by_config() -> None:
    trajectory = built(*retried(), siblings="exclude")
    assert shapes(trajectory) == [([1, 2], [6, 9, 3, 7, 9], [1, 1, 0, 1, 1])]
    assert reasons(trajectory) == [None]
    assert excluded(trajectory) == {"sibling": 2}


def test_t8_turn_without_logprobs_is_context() -> None:
    trajectory = built(c1(), c2([1, 2, 5, 6, 9, 3, 4], logprobs=None))
    (trace,) = trajectory.traces
    assert shape(trace) == ([1, 2], T1_RESPONSE, [1, 1, 1, 0, 0, 0, 0])
    assert trace.response_logprobs is not None
    np.testing.assert_array_equal(trace.response_logprobs, np.array([-0.1, -0.2, -0.3, 0, 0, 0, 0], dtype=np.float32))
    assert (trace.turns[1].trained, trace.turns[1].reason) == (False, "no_logprobs")
    assert excluded(trajectory) == {"no_logprobs": 2}


def test_t9_edited_history_is_another_trace() -> None:
    trajectory = built(c1(), c2([1, 2, 30, 9, 3], reply_in_history="x"))
    assert shapes(trajectory) == [([1, 2], [5, 6, 9], [1, 1, 1]), ([1, 2, 30, 9, 3], [7, 9], [1, 1])]
    assert reasons(trajectory) == [None, "reply_differs"]


def test_t9_no_end_of_turn_is_another_trace() -> None:
    first = completion("c1", [1, 2], [5, 9], at=1.0)
    second = completion("c2", [1, 2, 3], [6, 9], at=2.0)
    trajectory = built(first, second)
    assert shapes(trajectory) == [([1, 2], [5, 9], [1, 1]), ([1, 2, 3], [6, 9], [1, 1])]
    assert reasons(trajectory) == [None, "no_end_of_turn"]


@pytest.mark.parametrize("builder", [PrefixMergingBuilder(), PerRequestBuilder()])
def test_t12_empty_session(builder: PrefixMergingBuilder | PerRequestBuilder) -> None:
    trajectory = builder.build(session_of())
    assert (trajectory.status, trajectory.error, trajectory.traces) == (TrajectoryStatus.ERROR, "no completions", ())


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), True, "1.0"])
def test_t12_rewards_that_are_no_numbers(reward: object) -> None:
    with pytest.raises(ValueError, match="outcome_reward"):
        EvalResult.model_validate({"outcome_reward": reward})


@pytest.mark.parametrize(
    ("ids", "mask", "logprobs"),
    [([5], [2], [0.0]), ([5, 6], [1], [0.0, 0.0]), ([5, 6], [0, 0], [0.0]), ([5], [], None)],
)
def test_t12_arrays_that_do_not_fit(ids: list[int], mask: list[int], logprobs: list[float] | None) -> None:
    with pytest.raises(ValueError, match="Trace"):
        Trace(prompt_ids=[1], response_ids=ids, loss_mask=mask, response_logprobs=logprobs)


def test_t12_unknown_status() -> None:
    with pytest.raises(ValueError, match="status"):
        Trajectory.model_validate({"session_id": "s1", "status": "DONE"})


def test_per_request_keeps_every_call_apart() -> None:
    trajectory = PerRequestBuilder().build(session_of(c1(), c2([1, 2, 5, 6, 9, 3, 4])))
    assert shapes(trajectory) == [([1, 2], [5, 6, 9], [1, 1, 1]), ([1, 2, 5, 6, 9, 3, 4], [7, 9], [1, 1])]
    assert trajectory.metadata["merge_ratio"] == 1.0


def test_every_choice_can_be_continued() -> None:
    both = [choice([5, 9], index=0), choice([6, 9], index=1)]
    trajectory = built(completion("c1", [1, 2], both, at=1.0), completion("c2", [1, 2, 6, 9, 3], [7, 9], at=2.0))
    assert shapes(trajectory) == [([1, 2], [5, 9], [1, 1]), ([1, 2], [6, 9, 3, 7, 9], [1, 1, 0, 1, 1])]
    assert [(turn.completion_id, turn.choice) for turn in trajectory.traces[1].turns] == [("c1", 1), ("c2", 0)]


@pytest.mark.parametrize(
    "config", [{"end_of_turn_token_id": True}, {"end_of_turn_token_id": -1}, {"on_drift": "guess"}, {"siblings": 1}]
)
def test_config_is_checked(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        PrefixMergingBuilder(**config)
