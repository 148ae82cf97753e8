"""Members, groups and what a cut finds out about them."""

from typing import Any

import numpy as np
import pytest

from rollmill.models import PolicyVersion, TrajectoryStatus
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning
from rollmill_batcher.groups.eligibility import Gate, SamplePolicy, Treatment, judge
from rollmill_batcher.groups.group import TRANSITIONS, Group, GroupEvent, GroupState, moved
from rollmill_batcher.groups.group_evaluation import CutContext, EvaluationCache, grows_stale, state_of, usable
from rollmill_batcher.groups.staleness import PolicyClock, Staleness
from rollmill_batcher.steps.advantages import Grpo

BATCHER_RULES = BatcherConfig(
    run="r", policy="policy", learning=Learning("grpo", Grpo()), groups=GroupRules(deadline_seconds=60.0)
)
GATE = BATCHER_RULES.gate(PolicyClock())


def gate(limit: int | None = None, version: int = 0, **treatments: Treatment) -> Gate:
    clock = PolicyClock(PolicyVersion(0, version))
    return Gate(SamplePolicy(**treatments), Staleness(limit), clock, tokens=100, nbytes=4096)


def group_of(*rewards: float | None, size: int, **fields: Any) -> Group:
    group = Group("g")
    for number, reward in enumerate(rewards):
        group = group.joined(sample_trajectory(f"s{number}", reward, size=size, **fields))
    return group


def reasons(**changes: Any) -> list[str | None]:
    chosen = changes.pop("gate", gate())
    return [verdict.reason for verdict in judge(sample_trajectory("s", **changes), chosen).traces]


def test_members_are_sorted_and_later_revisions_replace() -> None:
    early, late = sample_trajectory("a", 0.0), sample_trajectory("a", 1.0, revision=1)
    other = sample_trajectory("b", 0.5)
    forward = Group("g").joined(early).joined(late).joined(other)
    backward = Group("g").joined(other).joined(late).joined(early)
    assert forward == backward
    assert [member.outcome_reward for member in forward.members] == [1.0, 0.5]


def test_the_highest_attempt_stands_for_its_session() -> None:
    first, second = sample_trajectory("a", 0.0), sample_trajectory("a", 1.0, attempt=2)
    group = Group("g").joined(second).joined(first)
    assert group.current == (second,)
    assert group.superseded == (first,)
    assert not group.is_full


def test_every_transition_starts_from_a_live_state() -> None:
    closed = {GroupState.CUT, GroupState.EXPIRED, GroupState.FAILED}
    assert not {state for state, _ in TRANSITIONS} & closed
    assert set(TRANSITIONS.values()) == set(GroupState) - {GroupState.OPEN}
    with pytest.raises(ValueError, match="cut cannot be filled"):
        moved(GroupState.CUT, GroupEvent.FILLED)


@pytest.mark.parametrize(
    ("rewards", "now", "state"),
    [
        ((1.0, 0.0, 0.5), 100.0, GroupState.COMPLETE),
        ((1.0, None, 0.5), 100.0, GroupState.COMPLETE),
        ((1.0, 0.0), 159.0, GroupState.OPEN),
        ((1.0, 0.0), 160.0, GroupState.PARTIAL),
        ((1.0, None), 160.0, GroupState.EXPIRED),
        ((1.0,), 160.0, GroupState.EXPIRED),
    ],
)
def test_states_at_a_moment(rewards: tuple[float | None, ...], now: float, state: GroupState) -> None:
    assert state_of(group_of(*rewards, size=3), CutContext(now, GATE), BATCHER_RULES) is state


def test_no_deadline_is_waited_for_when_nothing_more_comes() -> None:
    assert (
        state_of(group_of(1.0, 0.0, size=3), CutContext(100.0, GATE, closing=True), BATCHER_RULES) is GroupState.PARTIAL
    )


def test_a_group_closes_at_the_last_cut_inside_the_limit() -> None:
    rules = BatcherConfig(
        run="r",
        policy="policy",
        learning=BATCHER_RULES.learning,
        groups=GroupRules(close_before_stale=True),
        staleness=Staleness(2),
    )
    group = group_of(1.0, 0.0, size=3)
    found = [
        grows_stale(group, CutContext(0.0, rules.gate(PolicyClock(PolicyVersion(0, v)))), rules) for v in (1, 2, 3)
    ]
    assert found == [False, True, False]
    assert not grows_stale(group_of(1.0, size=3), CutContext(0.0, rules.gate(PolicyClock(PolicyVersion(0, 2)))), rules)


def test_a_rollout_counts_once_whatever_its_number_of_traces() -> None:
    """Rollout a with three traces and reward 1, b with one and 0: baseline 0.5."""
    traces = [sample_trace("a", index=index) for index in range(3)]
    group = Group("g").joined(sample_trajectory("a", 1.0, traces=traces)).joined(sample_trajectory("b", 0.0))
    found = EvaluationCache().evaluate(group, GroupState.COMPLETE, GATE, BATCHER_RULES)
    assert found.rewards == [1.0, 0.0]
    assert [len(member.trained) for member in found.members] == [3, 1]


def test_ungraded_is_neither_zero_nor_counted() -> None:
    found = usable(
        EvaluationCache().evaluate(group_of(1.0, None, 0.0, size=3), GroupState.COMPLETE, GATE, BATCHER_RULES),
        BATCHER_RULES,
    )
    assert found.rewards == [1.0, 0.0]
    assert found.members[1].traces[0].reason == "ungraded:deadline"


def test_fewer_than_two_graded_is_no_group() -> None:
    found = usable(
        EvaluationCache().evaluate(group_of(1.0, None, size=2), GroupState.COMPLETE, GATE, BATCHER_RULES), BATCHER_RULES
    )
    assert (found.state, found.reason) == (GroupState.FAILED, "group_too_small")


def test_the_filter_of_equal_rewards_looks_at_rollouts() -> None:
    filtering = BatcherConfig(
        run="r", policy="policy", learning=BATCHER_RULES.learning, groups=GroupRules(drop_zero_variance=True)
    )
    spread, equal = (
        EvaluationCache().evaluate(group_of(*r, size=2), GroupState.COMPLETE, GATE, BATCHER_RULES)
        for r in ((1.0, 0.0), (1.0, 1.0))
    )
    assert usable(spread, filtering) is spread
    assert usable(equal, filtering).reason == "zero_variance"
    assert usable(equal, BATCHER_RULES) is equal


def test_a_group_without_a_trace_to_train_has_failed() -> None:
    found = usable(
        EvaluationCache().evaluate(
            group_of(1.0, 0.0, size=2), GroupState.COMPLETE, gate(limit=1, version=2), BATCHER_RULES
        ),
        BATCHER_RULES,
    )
    assert (found.state, found.reason) == (GroupState.FAILED, None)
    assert [verdict.reason for member in found.members for verdict in member.traces] == ["stale", "stale"]


def test_reasons_of_a_whole_rollout() -> None:
    assert reasons() == [None]
    assert reasons(reward=None) == ["ungraded:deadline"]
    assert reasons(reward=None, ungraded_reason=None) == ["ungraded:unknown"]
    assert reasons(status=TrajectoryStatus.ERROR) == ["error"]
    assert reasons(status=TrajectoryStatus.TIMEOUT) == ["timeout"]
    assert reasons(status=TrajectoryStatus.TIMEOUT, gate=gate(timeout=Treatment.TRAIN)) == [None]


def test_timeout_and_truncation_clear_trains_and_keep_counts() -> None:
    timeout = judge(sample_trajectory("s", 0.0, status=TrajectoryStatus.TIMEOUT), gate())
    assert (timeout.counts, timeout.trained) == (True, ())
    cut_off = [sample_trace("s", finish_reason="length"), sample_trace("s", index=1)]
    truncated = judge(sample_trajectory("s", 0.0, traces=cut_off), gate(truncated=Treatment.COUNT))
    assert (truncated.counts, [v.reason for v in truncated.traces]) == (True, ["truncated", None])
    assert reasons(traces=cut_off) == [None, None]


def test_an_excluded_rollout_does_not_count_either() -> None:
    error = sample_trajectory("s", 0.0, status=TrajectoryStatus.ERROR)
    assert judge(error, gate()).counts
    assert not judge(error, gate(error=Treatment.EXCLUDE)).counts


def test_an_empty_session_never_counts() -> None:
    """A session that ended without a model call: nothing to train, no part in the statistics."""
    empty = judge(sample_trajectory("s", 1.0, traces=()), gate())
    assert (empty.counts, empty.traces) == (False, ())


def test_reasons_of_single_traces() -> None:
    fresh, stale = Reply(version=PolicyVersion(0, 3)), Reply(version=PolicyVersion(0, 2))
    traces = [
        sample_trace("s", (fresh,)),
        sample_trace("s", (fresh, stale), index=1),
        sample_trace("s", (fresh,), index=2, loss_mask=np.zeros(3, np.uint8)),
        sample_trace("s", (Reply(tuple(range(1, 100)), PolicyVersion(0, 3)),), index=3),
        sample_trace("s", (fresh,), index=4, prompt=()),
    ]
    assert reasons(traces=traces, gate=gate(limit=1, version=4)) == [None, "stale", "masked", "too_large", "no_context"]


def test_a_trace_without_a_reward_is_excluded_alone() -> None:
    graded, other = sample_trace("s", reward=0.25), sample_trace("s", index=1)
    member = sample_trajectory("s", None, traces=(graded, other), evaluation=None, ungraded_reason=None)
    verdict = judge(member, gate())
    assert (verdict.reward, [v.reason for v in verdict.traces]) == (0.25, [None, "trace_not_graded"])
