"""Rewards from evaluations: broadcast, per trace, refused, ungraded, several evaluators, revised evaluations."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollmill.codec import decode
from rollmill.models import (
    EvalResult,
    Evaluation,
    EvaluatorSpec,
    PolicyVersion,
    SessionSpec,
    SessionStatus,
    Trace,
    Trajectory,
    VersionRun,
)
from rollmill_reward_merger.merging import merge
from rollmill_reward_merger.size_limit import fit, without_texts


def trace(tokens: int = 2) -> Trace:
    return Trace(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(5, 5 + tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        response_logprobs=np.full(tokens, -0.5, np.float32),
        versions=(VersionRun(PolicyVersion(), tokens),),
        prompt_messages=b'[{"role": "user"}]',
    )


def session(*evaluators: str | EvaluatorSpec, traces: int = 2, **changes: Any) -> Trajectory:
    specs = tuple(item if isinstance(item, EvaluatorSpec) else EvaluatorSpec(strategy=item) for item in evaluators)
    values = {"status": SessionStatus.COMPLETED, "spec": SessionSpec(evaluators=specs), **changes}
    return Trajectory(session_id="s1", traces=tuple(trace(index + 1) for index in range(traces)), **values)


def evaluated(name: str = "e1", evaluator: str = "judge", **result: Any) -> Evaluation:
    return Evaluation(evaluation_id=name, session_id="s1", evaluator=evaluator, **result)


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [item.reward for item in trajectory.traces]


def of(trajectory: Trajectory, key: str) -> Any:
    assert trajectory.evaluation is not None
    return trajectory.evaluation[key]


@pytest.mark.parametrize("value", [0.5, 0.0, -1.0])
def test_t10_an_outcome_is_broadcast_and_zero_is_a_value(value: float) -> None:
    merged = merge(session("judge"), [evaluated(outcome_reward=value)])
    assert rewards(merged) == [value, value]
    assert of(merged, "outcome_reward") == value
    assert of(merged, "trace_rewards") is None
    assert merged.ungraded_reason is None
    assert merged.outcome_reward == value


def test_t10_a_grader_without_an_opinion_leaves_none() -> None:
    merged = merge(session("judge"), [evaluated()])
    assert rewards(merged) == [None, None]
    assert merged.status is SessionStatus.COMPLETED
    assert merged.ungraded_reason == "no_reward"
    assert not merged.graded


def test_t11_trace_rewards_win_and_none_stays_none() -> None:
    merged = merge(session("judge"), [evaluated(trace_rewards=(1.0, None), outcome_reward=0.3)])
    assert rewards(merged) == [1.0, None]
    assert of(merged, "outcome_reward") == 0.3
    assert of(merged, "trace_rewards") == [1.0, None]


def test_t11_another_number_of_trace_rewards_is_an_error_that_names_both() -> None:
    merged = merge(session("judge"), [evaluated(trace_rewards=(1.0,), outcome_reward=0.3)])
    assert merged.status is SessionStatus.ERROR
    assert merged.error == "evaluator judge returned 1 trace_rewards but the trajectory has 2 traces"
    assert rewards(merged) == [None, None]
    assert merged.outcome_reward is None
    assert merged.ungraded_reason == "trace_count_mismatch"
    assert of(merged, "evaluations")[0]["trace_rewards"] == [1.0]


def test_a_mismatch_keeps_the_error_that_was_there() -> None:
    failed = session("judge", status=SessionStatus.TIMEOUT, error="deadline passed")
    merged = merge(failed, [evaluated(trace_rewards=())])
    assert merged.status is SessionStatus.ERROR
    assert merged.error is not None
    assert merged.error.startswith("deadline passed; evaluator judge returned 0")


def test_t11_no_traces_and_no_trace_rewards_agree() -> None:
    merged = merge(session("judge", traces=0), [evaluated(trace_rewards=())])
    assert merged.status is SessionStatus.COMPLETED
    assert merged.error is None
    assert merged.ungraded_reason is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1.0", 3.5e38])
def test_t12_what_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        EvalResult.model_validate({"outcome_reward": value})
    with pytest.raises(ValidationError):
        EvalResult.model_validate({"trace_rewards": [1.0, value]})


@pytest.mark.parametrize("status", list(SessionStatus))
def test_a_session_that_did_not_complete_keeps_its_reward(status: SessionStatus) -> None:
    merged = merge(session("judge", status=status), [evaluated(outcome_reward=0.5)])
    assert merged.status is status
    assert rewards(merged) == [0.5, 0.5]


def test_without_evaluators_there_is_no_reward_and_a_name_for_it() -> None:
    merged = merge(session(), [])
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason == "no_evaluator"
    assert merged.evaluation is None


@pytest.mark.parametrize("reason", ["evaluator_error", "evaluator_timeout", "sandbox_lost"])
def test_not_graded_is_never_a_number(reason: str) -> None:
    merged = merge(session("judge"), [evaluated(not_graded=reason)])
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason == reason
    assert merged.outcome_reward is None


def test_an_evaluator_that_never_answered_is_the_deadline() -> None:
    deadline = evaluated("d", "deadline", final=True, not_graded="deadline")
    merged = merge(session("judge", "tests"), [evaluated(outcome_reward=1.0), deadline])
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason == "deadline"
    assert [entry["evaluator"] for entry in of(merged, "evaluations")] == ["judge", "deadline"]


def test_several_evaluators_give_the_weighted_mean_of_their_outcomes() -> None:
    judge, tests = EvaluatorSpec(strategy="judge", weight=3.0), EvaluatorSpec(strategy="tests")
    evaluations = [evaluated("a", "tests", outcome_reward=0.0), evaluated("b", "judge", outcome_reward=1.0)]
    merged = merge(session(judge, tests), evaluations)
    assert rewards(merged) == [0.75, 0.75]
    assert of(merged, "rule") == "weighted_mean"
    assert [entry["share"] for entry in of(merged, "evaluations")] == [0.25, 0.75]
    assert merge(session(judge, tests), evaluations[::-1]).outcome_reward == merged.outcome_reward


def test_trace_rewards_and_outcomes_of_several_evaluators_mix_per_trace() -> None:
    evaluations = [evaluated("a", "judge", outcome_reward=1.0), evaluated("b", "tests", trace_rewards=(0.0, None))]
    merged = merge(session("judge", "tests"), evaluations)
    assert rewards(merged) == [0.5, None]
    assert of(merged, "outcome_reward") is None
    assert merged.outcome_reward == 0.5


@pytest.mark.parametrize("missing", [{}, {"not_graded": "evaluator_error"}])
def test_one_required_evaluator_without_a_grade_leaves_the_rollout_ungraded(missing: dict[str, Any]) -> None:
    merged = merge(
        session("judge", "tests"), [evaluated("a", "judge", outcome_reward=1.0), evaluated("b", "tests", **missing)]
    )
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason == (missing.get("not_graded") or "no_reward")


def test_weight_zero_is_kept_but_never_counts() -> None:
    watcher = EvaluatorSpec(strategy="watcher", weight=0.0)
    merged = merge(
        session("judge", watcher), [evaluated(outcome_reward=0.1), evaluated("w", "watcher", not_graded="broken")]
    )
    assert rewards(merged) == [0.1, 0.1]
    assert of(merged, "rule") == "single"
    assert of(merged, "evaluations")[1]["not_graded"] == "broken"


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValidationError):
        EvaluatorSpec(strategy="judge", weight=-1.0)


@pytest.mark.parametrize("weight", [1e-300, 0.3, 1e308])
def test_one_evaluator_passes_unchanged_whatever_its_weight(weight: float) -> None:
    merged = merge(session(EvaluatorSpec(strategy="judge", weight=weight)), [evaluated(outcome_reward=0.1)])
    assert merged.outcome_reward == 0.1


def test_huge_weights_and_rewards_stay_finite() -> None:
    specs = [EvaluatorSpec(strategy=name, weight=1e308) for name in ("judge", "tests")]
    evaluations = [evaluated("a", "judge", outcome_reward=3.3e38), evaluated("b", "tests", outcome_reward=3.3e38)]
    assert merge(session(*specs), evaluations).outcome_reward == 3.3e38


def test_an_external_grader_counts_where_the_spec_names_none() -> None:
    merged = merge(session(), [evaluated("h", "human", outcome_reward=1.0)])
    assert rewards(merged) == [1.0, 1.0]
    assert merged.ungraded_reason is None


def test_an_external_grader_is_provenance_where_the_spec_names_others() -> None:
    merged = merge(session("judge"), [evaluated(outcome_reward=0.5), evaluated("h", "human", outcome_reward=1.0)])
    assert rewards(merged) == [0.5, 0.5]
    assert [entry["share"] for entry in of(merged, "evaluations")] == [1.0, None]


def test_whoever_supersedes_speaks_for_the_slot() -> None:
    evaluations = [
        evaluated("a", "judge", outcome_reward=0.5),
        evaluated("h", "human", outcome_reward=1.0, supersedes="a"),
    ]
    merged = merge(session("judge"), evaluations)
    assert rewards(merged) == [1.0, 1.0]
    assert [entry["stands"] for entry in of(merged, "evaluations")] == [False, True]
    again = merge(session("judge"), [*evaluations, evaluated("h2", "human", outcome_reward=0.25, supersedes="h")])
    assert rewards(again) == [0.25, 0.25]


def test_a_revised_word_can_take_a_grade_back() -> None:
    merged = merge(
        session("judge"), [evaluated(outcome_reward=0.5), evaluated("e2", not_graded="retracted", supersedes="e1")]
    )
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason == "retracted"


def test_b092_what_the_agent_handed_in_stands_beside_its_tokens_and_its_reward() -> None:
    merged = merge(session("judge", traces=1, output={"action": "42"}), [evaluated(outcome_reward=1.0)])
    assert merged.output == b'{"action":"42"}'
    assert (merged.traces[0].response_ids.tolist(), rewards(merged)) == ([5], [1.0])


def test_an_evaluators_metadata_overwrites_nothing() -> None:
    loud = {"outcome_reward": 9.0, "trace_rewards": [9.0, 9.0], "evaluations": [], "evaluation_id": "x"}
    merged = merge(
        session("judge"),
        [evaluated(outcome_reward=0.5, metadata=loud, components={"style": 0.2}, version="7", duration_seconds=1.5)],
    )
    assert merged.outcome_reward == 0.5
    (entry,) = of(merged, "evaluations")
    assert entry["evaluation_id"] == "e1"
    assert entry["metadata"] == loud
    assert (entry["components"], entry["version"], entry["duration_seconds"]) == ({"style": 0.2}, "7", 1.5)


def test_what_graders_said_is_cut_before_texts_and_tokens_stay() -> None:
    evaluations = [
        evaluated(f"e{index}", "judge", outcome_reward=0.5, metadata={"log": "x" * 5000}) for index in range(3)
    ]
    merged = merge(session("judge"), evaluations)
    full = len(fit(merged, 2**20))
    assert full > 15_000
    assert len(fit(merged, full)) == full
    assert 2_000 > len(fit(merged, 5_000)) > 1_000
    bare = len(fit(merged, 10))
    assert bare < len(fit(without_texts(merged), 5_000))
    assert len(merged.traces[0].response_ids) == 1


def test_rewards_of_tokens_are_the_last_to_be_cut_and_the_reward_stays() -> None:
    long = session("judge", traces=1).replace(traces=(trace(5000),))
    merged = merge(long, [evaluated(outcome_reward=0.5, token_rewards=((1.0,) * 5000,))])
    whole = decode(Trajectory, fit(merged, 10**6))
    assert whole.traces[0].token_rewards is not None
    cut = decode(Trajectory, fit(merged, len(fit(merged, 10**6)) - 10_000))
    assert (cut.traces[0].token_rewards, cut.traces[0].reward, cut.outcome_reward) == (None, 0.5, 0.5)
    assert cut.metadata["cut"][-1] == "token_rewards"
