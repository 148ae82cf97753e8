"""Several evaluators by each rule, rewards inside of traces, and what a batch makes of them, by value."""

from typing import Any

import numpy as np
import pytest

from rollmill.codec import decode
from rollmill.models import Evaluation, EvaluatorSpec, RewardRule, SessionSpec, SessionStatus, Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace
from rollmill.topics import BATCHES, BUILT, EVALUATIONS, OUTCOMES, TRAJECTORIES
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, Learning
from rollmill_batcher.groups.eligibility import SamplePolicy, Treatment
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.advantages import NoAdvantage
from rollmill_reward_merger.merging import merge
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.timers import Due, Timer, Windows

JUDGE, TESTS = EvaluatorSpec(strategy="judge", weight=3.0), EvaluatorSpec(strategy="tests", weight=0.5)


def session(rule: RewardRule, *specs: EvaluatorSpec, traces: int = 2, **changes: Any) -> Trajectory:
    replies = (Reply((5, 6), then=(9,)), Reply((7,), then=(9, 9)), Reply((8, 8)))
    made = tuple(sample_trace("s1", replies, index=index) for index in range(traces))
    spec = SessionSpec(evaluators=specs, reward_rule=rule)
    return Trajectory(
        **{"session_id": "s1", "status": SessionStatus.COMPLETED, "spec": spec, "traces": made, **changes}
    )


def evaluated(evaluator: str, **result: Any) -> Evaluation:
    return Evaluation(evaluation_id=f"of-{evaluator}", session_id="s1", evaluator=evaluator, **result)


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [trace.reward for trace in trajectory.traces]


def at_tokens(trajectory: Trajectory) -> list[list[float] | None]:
    return [None if trace.token_rewards is None else trace.token_rewards.tolist() for trace in trajectory.traces]


@pytest.mark.parametrize(
    ("rule", "outcome", "per_trace"),
    [
        (RewardRule.WEIGHTED_MEAN, (3 * 1.0 + 0.5 * 0.5) / 3.5, [(3 * 0.25 + 0.25) / 3.5, (3 * 2.0 + 0.25) / 3.5]),
        (RewardRule.WEIGHTED_SUM, 3.25, [1.0, 6.25]),
        (RewardRule.MIN, 0.5, [0.25, 0.5]),
        (RewardRule.MAX, 1.0, [0.5, 2.0]),
        (RewardRule.FIRST, 1.0, [0.25, 2.0]),
        (RewardRule.LAST, 0.5, [0.5, 0.5]),
    ],
)
def test_each_rule_combines_outcomes_and_traces(rule: RewardRule, outcome: float, per_trace: list[float]) -> None:
    evaluations = [
        evaluated("judge", outcome_reward=1.0, trace_rewards=(0.25, 2.0)),
        evaluated("tests", outcome_reward=0.5),
    ]
    merged = merge(session(rule, JUDGE, TESTS), evaluations)
    assert merged.evaluation is not None
    assert merged.evaluation["outcome_reward"] == pytest.approx(outcome)
    assert rewards(merged) == pytest.approx(per_trace)
    assert merged.evaluation["rule"] == rule.value
    assert [entry["evaluator"] for entry in merged.evaluation["evaluations"]] == ["judge", "tests"]


def test_only_the_rule_last_depends_on_the_order_of_the_words() -> None:
    evaluations = [evaluated("judge", outcome_reward=1.0), evaluated("tests", outcome_reward=0.5)]
    for rule in RewardRule:
        one, other = (merge(session(rule, JUDGE, TESTS), each) for each in (evaluations, evaluations[::-1]))
        assert (rewards(one) == rewards(other)) is (rule is not RewardRule.LAST), rule


@pytest.mark.parametrize("rule", list(RewardRule))
def test_a_missing_grade_is_passed_over_only_by_rules_that_take_one(rule: RewardRule) -> None:
    merged = merge(
        session(rule, JUDGE, TESTS), [evaluated("judge", not_graded="down"), evaluated("tests", outcome_reward=0.5)]
    )
    takes_one = rule in (RewardRule.FIRST, RewardRule.LAST)
    assert rewards(merged) == ([0.5, 0.5] if takes_one else [None, None])
    assert merged.ungraded_reason == (None if takes_one else "down")


@pytest.mark.parametrize("rule", list(RewardRule))
def test_where_nobody_grades_every_rule_leaves_it_ungraded(rule: RewardRule) -> None:
    merged = merge(session(rule, JUDGE, TESTS), [evaluated("judge", not_graded="down"), evaluated("tests")])
    assert rewards(merged) == [None, None]
    assert merged.ungraded_reason in ("down", "no_reward")


def test_a_sum_that_no_batch_can_hold_is_no_reward() -> None:
    heavy = EvaluatorSpec(strategy="judge", weight=1e300)
    merged = merge(session(RewardRule.WEIGHTED_SUM, heavy), [evaluated("judge", outcome_reward=2.0)])
    assert merged.ungraded_reason == "reward_out_of_range"
    assert rewards(merged) == [None, None]


def test_b093_step_rewards_and_the_outcome_are_counted_once() -> None:
    """Three turns, 0.1 for the first, 1.0 at the end: 0.1 at the turn's last token, 1.0 at the end, sum 1.1."""
    one = session(RewardRule.WEIGHTED_MEAN, JUDGE, traces=1)
    merged = merge(one, [evaluated("judge", outcome_reward=1.0, turn_rewards=((0.1, None, None),))])
    assert at_tokens(merged) == [pytest.approx([0, 0.1, 0, 0, 0, 0, 0, 1.0])]
    assert rewards(merged) == [1.0]
    assert [turn.reward for turn in merged.traces[0].turns] == [0.1, None, None]
    assert merged.evaluation is not None
    assert merged.evaluation["shaping"] == "rest_at_last_sampled_token"


def test_b059_a_reward_goes_to_the_turn_that_it_names_and_to_no_other() -> None:
    """Two agents called side by side: the reward of the first call is its own, whatever came in between."""
    merged = merge(
        session(RewardRule.WEIGHTED_MEAN, JUDGE), [evaluated("judge", turn_rewards=((0.8, None, None), None))]
    )
    assert [[turn.reward for turn in trace.turns] for trace in merged.traces] == [[0.8, None, None], [None] * 3]
    assert [trace.token_rewards is not None and trace.token_rewards.argmax() for trace in merged.traces] == [1, 0]
    assert rewards(merged) == [0.8, 0.0]


def test_an_outcome_goes_once_to_the_last_trace_and_trace_rewards_to_their_own() -> None:
    inside = {"turn_rewards": (None, (None, 2.0, None))}
    outcome = merge(session(RewardRule.WEIGHTED_MEAN, JUDGE), [evaluated("judge", outcome_reward=1.0, **inside)])
    assert at_tokens(outcome) == [[0.0] * 8, [0, 0, 0, 2, 0, 0, 0, 1]]
    assert rewards(outcome) == [1.0, 1.0]
    per_trace = merge(
        session(RewardRule.WEIGHTED_MEAN, JUDGE), [evaluated("judge", trace_rewards=(0.5, None), **inside)]
    )
    assert at_tokens(per_trace) == [[0, 0, 0, 0, 0, 0, 0, 0.5], [0, 0, 0, 2, 0, 0, 0, 0]]
    assert rewards(per_trace) == [0.5, None]


def test_token_rewards_alone_sum_to_the_traces_reward() -> None:
    values = ((0.5, 0.25) + (0.0,) * 6, None)
    merged = merge(session(RewardRule.WEIGHTED_MEAN, JUDGE), [evaluated("judge", token_rewards=values)])
    assert rewards(merged) == [0.75, 0.0]
    assert at_tokens(merged) == [[0.5, 0.25, 0, 0, 0, 0, 0, 0], [0.0] * 8]


def test_shaped_and_plain_evaluators_mix_by_their_shares() -> None:
    even = [EvaluatorSpec(strategy=name) for name in ("judge", "tests")]
    evaluations = [
        evaluated("judge", outcome_reward=1.0, turn_rewards=((4.0, None, None),)),
        evaluated("tests", outcome_reward=0.5),
    ]
    merged = merge(session(RewardRule.WEIGHTED_MEAN, *even, traces=1), evaluations)
    assert at_tokens(merged) == [[0, 2, 0, 0, 0, 0, 0, 0.75]]
    assert rewards(merged) == [0.75]


@pytest.mark.parametrize(
    ("given", "reason", "numbers"),
    [
        ({"trace_rewards": (1.0,)}, "trace_count_mismatch", "1 trace_rewards but the trajectory has 2 traces"),
        ({"turn_rewards": ((1.0,) * 3,)}, "trace_count_mismatch", "1 turn_rewards but the trajectory has 2 traces"),
        ({"turn_rewards": (None, (1.0,))}, "turn_count_mismatch", "1 turn_rewards for trace 1 but it has 3 turns"),
        (
            {"token_rewards": ((1.0,) * 7, None)},
            "token_count_mismatch",
            "7 token_rewards for trace 0 but it has 8 response tokens",
        ),
    ],
)
def test_another_number_of_rewards_makes_the_session_an_error(given: Any, reason: str, numbers: str) -> None:
    merged = merge(session(RewardRule.WEIGHTED_MEAN, JUDGE), [evaluated("judge", outcome_reward=1.0, **given)])
    assert merged.status is SessionStatus.ERROR
    assert merged.error == f"evaluator judge returned {numbers}"
    assert merged.ungraded_reason == reason
    assert rewards(merged) == [None, None]
    assert at_tokens(merged) == [None, None]


def merged_by_the_service(trajectory: Trajectory, *evaluations: Evaluation) -> Trajectory:
    """Through the stage and the wire, as the batcher reads it."""
    task = MemoryTask(RewardMergerStage(partitions=1, windows=Windows(600.0, 600.0, 600.0)))
    task.feed(BUILT, trajectory)
    for evaluation in evaluations:
        task.feed(EVALUATIONS, evaluation)
    (emit,) = task.of(TRAJECTORIES)
    assert isinstance(emit.value, bytes)
    found: Trajectory = decode(Trajectory, emit.value, emit.headers)
    return found


def batched(*members: Trajectory, **sample_policy: Treatment) -> tuple[list[PackedBatch], dict[str, str]]:
    """The micro-batches of one step, and why the rest was left out, by session."""
    rules = BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("none", NoAdvantage()),
        sample_policy=SamplePolicy(**sample_policy),
        groups_per_step=1,
    )
    task: MemoryTask[Any] = MemoryTask(BatcherStage(rules))
    for member in members:
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    batches = [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]
    left = {emit.value.session_id: emit.value.reason for emit in task.of(OUTCOMES)}  # type: ignore[union-attr]  # models
    return batches, left


def test_rewards_inside_reach_the_tensors_at_their_tokens() -> None:
    evaluation = evaluated("judge", outcome_reward=1.0, turn_rewards=(None, (0.5, None, -2.0)))
    (batch,), _ = batched(merged_by_the_service(session(RewardRule.WEIGHTED_MEAN, JUDGE), evaluation))
    assert batch.token_rewards is not None
    assert batch.rewards.tolist() == [1.0, 1.0]
    assert batch.cu_seqlens.tolist() == [0, 10, 20]
    assert np.flatnonzero(batch.token_rewards).tolist() == [10 + 2 + 1, 10 + 2 + 7]
    assert batch.token_rewards[[13, 19]].tolist() == [0.5, -1.0]
    turns = np.repeat(batch.turn_ids[:, 0], batch.turn_ids[:, 1])
    assert turns[[13, 19]].tolist() == [0, 2]


GROUPED = {"group_id": "g", "group_size": 2}


def member(name: str, *evaluations: Evaluation, evaluators: int = 1, status: str = "COMPLETED") -> Trajectory:
    specs = tuple(EvaluatorSpec(strategy="judge") for _ in range(evaluators))
    trajectory = Trajectory(
        session_id=name,
        status=SessionStatus(status),
        spec=SessionSpec(evaluators=specs, **GROUPED),
        traces=(sample_trace(name, (Reply((5, 6)),)),),
    )
    return merged_by_the_service(trajectory, *(evaluation.replace(session_id=name) for evaluation in evaluations))


GOOD = evaluated("judge", outcome_reward=1.0)
DEADLINE = Due(Timer.DEADLINE, "s1:1", b"", 9.0).record()


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (member("b", evaluators=0), "ungraded:no_evaluator"),
        (member("b", evaluated("judge")), "ungraded:no_reward"),
        (member("b", evaluated("judge", not_graded="evaluator_error")), "ungraded:evaluator_error"),
        (member("b", DEADLINE), "ungraded:deadline"),
        (member("b", evaluated("judge", trace_rewards=(1.0, 0.0))), "error"),
        (member("b", GOOD, status="ERROR"), "error"),
        (member("b", GOOD, status="TIMEOUT"), "timeout"),
    ],
)
def test_every_row_of_what_a_rollout_can_come_to(odd: Trajectory, reason: str) -> None:
    """Beside two members that were graded 1.0 and 0.0, which count and train whatever the odd one is."""
    zero = member("c", evaluated("judge", outcome_reward=0.0))
    members = [item.replace(spec=item.spec.replace(group_size=3)) for item in (member("a", GOOD), odd, zero)]
    batches, left = batched(*members)
    trained = sorted(row.session_id for row in batches[0].header.table)
    assert trained == ["a", "c"]
    assert left == {"b": reason}
    graded = reason in ("timeout", "error") and odd.outcome_reward is not None
    (group,) = batches[0].header.groups
    assert len(group.rewards) == (3 if graded else 2)


def test_a_timeout_can_train_with_its_reward() -> None:
    members = [member("a", GOOD), member("b", evaluated("judge", outcome_reward=0.0), status="TIMEOUT")]
    batches, left = batched(*members, timeout=Treatment.TRAIN)
    assert {row.session_id for row in batches[0].header.table} == {"a", "b"}
    assert sorted(batches[0].rewards.tolist()) == [0.0, 1.0]
    assert left == {}
