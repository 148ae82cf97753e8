"""What the models accept, refuse and keep."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from rollmill.codec import decode, encode
from rollmill.models import (
    CompletionEvent,
    CompletionRecord,
    CompletionSession,
    EvalResult,
    EvaluatorSpec,
    PolicyVersion,
    SampledChoice,
    SessionSpec,
    TokenRange,
    Trace,
    TraceTurn,
    Trajectory,
    VersionRun,
    expand,
    is_identifier,
    run_lengths,
    staleness,
    trained_versions,
)

V3, V4 = PolicyVersion(0, 3), PolicyVersion(0, 4)


def trace(**changes: Any) -> Trace:
    fields: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 9],
        "loss_mask": [1, 1, 1],
        "response_logprobs": [-0.1, -0.2, -0.3],
    }
    return Trace.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss_mask": [1, 2, 1]}, "above 1"),
        ({"loss_mask": [1, 1]}, "2 values for 3"),
        ({"loss_mask": []}, "0 values for 3"),
        ({"loss_mask": [True, True, True]}, "found bool"),
        ({"loss_mask": [1.0, 1.0, 1.0]}, "found float"),
        ({"response_ids": [5, -1, 9]}, "below 0"),
        ({"response_ids": [5, 2**31, 9]}, "above"),
        ({"response_ids": [5, "6", 9]}, "found str"),
        ({"response_ids": [5, None, 9]}, "found NoneType"),
        ({"response_ids": b"\x01\x02\x03"}, "no whole number"),
        ({"response_ids": np.zeros((1, 3), np.int32)}, "one dimension"),
        ({"response_ids": np.zeros(3, np.float32)}, "float32"),
        ({"response_logprobs": [-0.1]}, "1 values for 3"),
        ({"response_logprobs": [-0.1, float("nan"), -0.3]}, "value 1 is not finite"),
        ({"response_logprobs": [-0.1, float("-inf"), -0.3]}, "value 1 is not finite"),
        ({"response_logprobs": None}, "need response_logprobs"),
        ({"versions": [[[0, 3], 2]]}, "versions cover 2 tokens of 3"),
        ({"reward": float("inf")}, "finite"),
        ({"reward": True}, "bool"),
    ],
)
def test_a_trace_refuses_what_would_train_wrongly(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        trace(**changes)


@pytest.mark.parametrize("number", [True, "1.0", float("nan"), float("inf"), b"1"])
def test_a_reward_is_a_finite_number_and_nothing_that_looks_like_one(number: object) -> None:
    with pytest.raises(ValidationError):
        EvalResult.model_validate({"outcome_reward": number})
    with pytest.raises(ValidationError):
        EvalResult.model_validate({"trace_rewards": [0.0, number]})


def test_zero_is_a_reward_and_none_is_not() -> None:
    assert EvalResult(outcome_reward=0).outcome_reward == 0.0
    assert EvalResult(trace_rewards=(1.0, None)).trace_rewards == (1.0, None)
    with pytest.raises(ValidationError, match="not both"):
        EvalResult(outcome_reward=0.0, not_graded="sandbox_lost")


def test_a_trajectory_knows_three_statuses() -> None:
    assert Trajectory(session_id="s", status="TIMEOUT").status == "TIMEOUT"
    with pytest.raises(ValidationError, match="COMPLETED"):
        Trajectory.model_validate({"session_id": "s", "status": "DONE"})


@pytest.mark.parametrize("content_type", ["application/json", "application/msgpack"])
def test_a_trajectory_survives_both_formats(content_type: str) -> None:
    made = Trajectory(
        session_id="s",
        status="COMPLETED",
        traces=(trace(versions=[[[0, 3], 2], [[0, 4], 1]], turns=[{"completion_id": "c", "start": 0, "stop": 3}]),),
        output={"answer": 42},
        metadata={"nested": {"list": [1, 2]}},
    )
    read = decode(Trajectory, encode(made, content_type), (("content-type", content_type.encode()),))
    assert read == made
    assert read.traces[0].versions[0].version == V3
    assert not read.traces[0].response_ids.flags.writeable


def test_internal_token_arrays_are_packed_little_endian_bytes() -> None:
    fields = msgpack.unpackb(encode(trace()))
    assert fields["response_ids"] == np.array([5, 6, 9], "<i4").tobytes()
    assert fields["loss_mask"] == b"\x01\x01\x01"
    assert fields["response_logprobs"] == np.array([-0.1, -0.2, -0.3], "<f4").tobytes()


def test_an_array_given_by_its_owner_is_copied_before_it_is_frozen() -> None:
    ids = np.array([5, 6, 9], np.int32)
    made = trace(response_ids=ids)
    ids[0] = 7
    assert made.response_ids.tolist() == [5, 6, 9]


def test_equality_looks_into_arrays() -> None:
    assert trace() == trace()
    assert trace() != trace(response_ids=[5, 6, 8])
    assert trace() != "trace"


def test_units_are_the_trained_ranges_split_where_the_version_changes() -> None:
    made = trace(
        response_ids=[5, 6, 3, 7, 9],
        loss_mask=[1, 1, 0, 1, 1],
        response_logprobs=[-1.0] * 5,
        versions=[[[0, 3], 2], [None, 1], [[0, 3], 1], [[0, 4], 1]],
        turns=[TraceTurn(completion_id="c1", start=0, stop=2), TraceTurn(completion_id="c2", start=3, stop=5)],
    )
    assert made.units() == (TokenRange("c1", 0, 0, 2, V3), TokenRange("c2", 0, 0, 1, V3), TokenRange("c2", 0, 1, 2, V4))
    assert made.oldest_version == V3
    assert made.versions_trained == {V3: 3, V4: 1}


def test_context_tokens_never_count_as_the_oldest_version() -> None:
    labels = [None, None, V3, V3, None, V4, V4]
    runs = run_lengths(labels)
    assert runs == (VersionRun(None, 2), VersionRun(V3, 2), VersionRun(None, 1), VersionRun(V4, 2))
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.uint8)
    assert trained_versions(runs, mask) == {V3: 2, V4: 2}
    assert expand(runs)[:, 1].tolist() == [-1, -1, 3, 3, -1, 4, 4]


@pytest.mark.parametrize(
    ("sampled", "current", "forks", "expected"),
    [
        ((0, 3), (0, 5), {}, 2),
        ((0, 5), (0, 5), {}, 0),
        ((0, 6), (0, 5), {}, -1),
        ((0, 3), (1, 5), {1: 4}, 2),  # before the fork: as if the epoch had gone on
        ((0, 7), (1, 5), {1: 4}, 1 + 3),  # after the fork: back to it and forth again
        ((0, 7), (2, 9), {1: 6, 2: 5}, 4 + 2),  # the lowest fork on the way counts
    ],
)
def test_staleness_counts_versions_also_over_epochs(
    sampled: tuple[int, int], current: tuple[int, int], forks: dict[int, int], expected: int
) -> None:
    assert staleness(PolicyVersion(*sampled), PolicyVersion(*current), forks) == expected


def test_a_session_sorts_its_records_whatever_the_order() -> None:
    records = [
        CompletionRecord(session_id="s", completion_id=i, started_at=t) for i, t in [("b", 2), ("c", 1), ("a", 2)]
    ]
    expected = ["c", "a", "b"]
    for order in (records, records[::-1]):
        session = CompletionSession(session_id="s", completions=tuple(order))
        assert [record.completion_id for record in session.completions] == expected


def test_choice_lengths_agree() -> None:
    with pytest.raises(ValidationError, match="1 logprobs for 2 token_ids"):
        SampledChoice.model_validate({"token_ids": [5, 6], "logprobs": [-0.1]})
    with pytest.raises(ValidationError, match="share one index"):
        CompletionRecord.model_validate({"session_id": "s", "completion_id": "c", "choices": [{}, {}]})


def test_events_are_told_apart_by_type() -> None:
    event = decode(CompletionEvent, b'{"type":"session_closed","session_id":"s","reward":0}')
    assert (type(event).__name__, event.reward) == ("SessionClosed", 0.0)


def test_two_evaluators_of_one_name_are_refused() -> None:
    twice = [EvaluatorSpec(strategy="http"), EvaluatorSpec(strategy="http")]
    with pytest.raises(ValidationError, match="set `name`"):
        SessionSpec(evaluators=tuple(twice))
    assert EvaluatorSpec(strategy="pkg.mod:Class").label == "pkg.mod.Class"


@pytest.mark.parametrize("session_id", ["", "a/b", "a:b", "-a", "ä", "x" * 129, "a b"])
def test_ids_are_safe_in_keys_paths_and_logs(session_id: str) -> None:
    with pytest.raises(ValidationError):
        SessionSpec(group_id=session_id)


def test_the_reward_of_a_rollout_is_the_outcome_or_the_weighted_mean_of_its_traces() -> None:
    long, short = trace(reward=1.0), trace(response_ids=[5], loss_mask=[1], response_logprobs=[-1.0], reward=0.0)
    made = Trajectory(session_id="s", status="COMPLETED", traces=(long, short))
    assert made.outcome_reward == 0.75
    assert made.replace(evaluation={"outcome_reward": 0.5}).outcome_reward == 0.5
    assert made.replace(traces=()).outcome_reward is None


@pytest.mark.parametrize("size", [True, 8.0, "8", 0])
def test_a_group_size_is_a_whole_number(size: object) -> None:
    with pytest.raises(ValidationError):
        SessionSpec.model_validate({"group_size": size})


@pytest.mark.parametrize("text", ["abc\n", "abc\n\n", "\nabc", "a\r", "", "a" * 129, "-a", "a b", "é"])
def test_f18_an_identifier_is_one_from_its_first_to_its_last_character(text: str) -> None:
    assert not is_identifier(text)
    assert is_identifier("abc")
