"""What a step is made of: order, budgets, credit, refills, indices and extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog

from rollmill.models import (
    BatchHeader,
    Cut,
    PolicyAnnouncement,
    PolicyVersion,
    RefillRequest,
    SessionSpec,
    StepAcknowledged,
    TokenDisposition,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import ACKS, BATCHES, CUTS, OUTCOMES, POLICIES, REFILLS, TRAJECTORIES
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, Credit, GroupRules, Learning, LossWeighting, Size, StepOrder
from rollmill_batcher.groups.eligibility import Treatment
from rollmill_batcher.groups.staleness import Staleness
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo, Grpo, NoAdvantage, Rloo
from rollmill_batcher.steps.reward_variance_monitor import MOST_IN_A_ROW

BATCHER_CONFIG = BatcherConfig(
    run="run",
    policy="policy",
    learning=Learning("dr_grpo", DrGrpo()),
    groups=GroupRules(deadline_seconds=60.0),
    groups_per_step=1,
    micro_batch=Size(64, 8192),
)
Task = MemoryTask[StateValue]


def task_of(*members: Trajectory, version: int = 0, **changes: Any) -> Task:
    task: Task = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, **changes)))
    task.feed(POLICIES, PolicyAnnouncement(version=PolicyVersion(0, version), at=1.0))
    for member in members:
        task.feed(TRAJECTORIES, member)
    return task


def ticked(*members: Trajectory, version: int = 0, **changes: Any) -> Task:
    task = task_of(*members, version=version, **changes)
    task.punctuate(200.0)
    return task


def pair(
    group: str, *, version: int = 0, opened_at: float = 50.0, rewards: tuple[float | None, ...] = (1.0, 0.0)
) -> Any:
    return tuple(
        sample_trajectory(f"{group}-{n}", reward, group=group, version=PolicyVersion(0, version), opened_at=opened_at)
        for n, reward in enumerate(rewards)
    )


def batches(task: Task) -> list[PackedBatch]:
    return [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]


def header_of(task: Task) -> BatchHeader:
    return batches(task)[0].header


def chosen(task: Task) -> list[tuple[str, ...]]:
    return [emit.value.groups for emit in task.of(CUTS) if isinstance(emit.value, Cut)]


def refills(task: Task) -> list[RefillRequest]:
    return [emit.value for emit in task.of(REFILLS) if isinstance(emit.value, RefillRequest)]


def reasons(task: Task) -> dict[str, int]:
    found: dict[str, int] = {}
    for emit in task.of(OUTCOMES):
        assert isinstance(emit.value, TokenDisposition)
        found[emit.value.reason or ""] = found.get(emit.value.reason or "", 0) + emit.value.tokens
    return found


def steps(task: Task, count: int) -> list[str]:
    """The groups of ``count`` steps of one group each, acknowledged one by one."""
    for step in range(count):
        task.punctuate(200.0)
        task.feed(ACKS, StepAcknowledged(run="run", rank=0, world_size=1, step=step, batch_id="b", at=1.0))
    return [group for groups in chosen(task) for group in groups]


AGES = [("a", 5, 10.0), ("b", 3, 20.0), ("c", 6, 30.0), ("d", 4, 40.0)]
"""Group, version, opening: at version 6 and limit 2 the ages are 1, 3 (too old), 0 and 2."""


def waiting(**changes: Any) -> Task:
    members = [member for name, version, at in AGES for member in pair(name, version=version, opened_at=at)]
    return task_of(*members, version=6, staleness=Staleness(2), **changes)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (StepOrder.FIFO, ["a", "c", "d"]),
        (StepOrder.FRESHEST, ["c", "a", "d"]),
        (StepOrder.OLDEST_IN_WINDOW, ["d", "a", "c"]),
    ],
)
def test_orders(order: StepOrder, expected: list[str]) -> None:
    task = waiting(order=order)
    assert steps(task, 3) == expected
    assert reasons(task) == {"stale": 6}


def test_a_group_that_no_order_would_reach_is_closed_all_the_same() -> None:
    task = waiting(order=StepOrder.FRESHEST)
    task.punctuate(200.0)
    assert chosen(task) == [("c",)]
    assert [request.group_id for request in refills(task)] == ["b"]


def test_a_stratified_step_holds_every_age_in_proportion() -> None:
    members = [m for n in range(12) for m in pair(f"g{n:02}", version=6 if n < 8 else 5, opened_at=float(n))]
    found = [
        ticked(*members, version=6, order=StepOrder.STRATIFIED, groups_per_step=6, seed=seed) for seed in (1, 1, 2)
    ]
    for task in found:
        names = chosen(task)[0]
        assert [name < "g08" for name in names].count(True) == 4
    assert chosen(found[0]) == chosen(found[1]) != chosen(found[2])


def test_a_token_budget_fills_a_step_with_whole_groups() -> None:
    """Each group has ten tokens."""
    members = [member for name in ("g0", "g1", "g2") for member in pair(name)]
    assert chosen(ticked(*members, tokens_per_step=29)) == [("g0", "g1")]
    assert chosen(ticked(*members, tokens_per_step=20)) == [("g0", "g1")]
    assert chosen(ticked(*members, tokens_per_step=5)) == [("g0",)]
    assert chosen(ticked(*members, tokens_per_step=31)) == []


def test_groups_failed_on_the_way_do_not_take_the_place_of_others() -> None:
    lone = sample_trajectory("x", 1.0, group="bad", size=2, opened_at=1.0)
    ungraded = sample_trajectory("y", None, group="bad", size=2, opened_at=1.0)
    task = ticked(lone, ungraded, *pair("g0"), *pair("g1"), tokens_per_step=20)
    assert chosen(task) == [("g0", "g1")]
    (request,) = refills(task)
    assert (request.group_id, request.count, request.reason) == ("bad", 2, "group_too_small")
    assert request.failures == {"ungraded:deadline": 1}


def test_a_refill_names_task_and_data_set_and_tells_infrastructure_from_policy() -> None:
    spec = SessionSpec(group_id="g", group_size=3, task_id="17", dataset="sums")
    crash = sample_trajectory("a", 0.0, status=TrajectoryStatus.ERROR)
    sandbox = sample_trajectory("b", None, ungraded_reason="sandbox")
    members = [member.replace(spec=spec) for member in (crash, sandbox)]
    task = ticked(*members)
    (request,) = refills(task)
    assert (request.task_id, request.dataset, request.count) == ("17", "sums", 3)
    assert (request.reason, request.failures) == ("group_expired", {"ungraded:sandbox": 1})
    assert {name: task.counts[name] for name in ("rollouts_failed", "rollouts_ungraded")} == {
        "rollouts_failed": 1,
        "rollouts_ungraded": 1,
    }


def test_equal_rewards_are_asked_for_again_where_they_are_filtered() -> None:
    task = ticked(*pair("g", rewards=(1.0, 1.0)), groups=GroupRules(deadline_seconds=60.0, drop_zero_variance=True))
    assert [(request.reason, request.count) for request in refills(task)] == [("zero_variance", 2)]
    assert reasons(task) == {"zero_variance": 6}


def test_b095_single_rollouts_are_no_zeros_and_not_asked_for_again() -> None:
    """Compared with none, a rollout would teach nothing; another one alone would not either."""
    alone = sample_trajectory("s", 0.7, group=None, size=1)
    task = ticked(alone)
    assert (batches(task), reasons(task), refills(task)) == ([], {"group_too_small": 3}, [])
    (batch,) = batches(ticked(alone, learning=Learning("none", NoAdvantage())))
    assert batch.rewards.tolist() == pytest.approx([0.7])


def test_a_step_asks_for_nothing() -> None:
    assert not refills(ticked(*pair("g")))


def graded(name: str, *rewards: float, outcome: float | None = None) -> Trajectory:
    """A rollout whose traces are graded one by one; the outcome, or their mean, is the rollout's reward."""
    traces = [sample_trace(name, index=n, reward=reward) for n, reward in enumerate(rewards)]
    return sample_trajectory(name, None, traces=traces, evaluation={"outcome_reward": outcome}, ungraded_reason=None)


def test_credit_by_rollout_gives_all_its_traces_one_advantage() -> None:
    batch = batches(ticked(graded("a", 1.0, 0.0), graded("b", 0.0)))[0]
    assert batch.advantages.tolist() == [0.25, 0.25, -0.25]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0]
    assert batch.header.credit == "rollout"


def test_credit_by_trace_lets_each_trace_stand_for_its_rollout() -> None:
    """RLOO: the trace's reward minus the mean of the other rollouts, whose mean counts a rollout once."""
    learning = Learning("rloo", Rloo(), credit=Credit.TRACE)
    batch = batches(ticked(graded("a", 1.0, 0.0), graded("b", 0.25), learning=learning))[0]
    assert batch.advantages.tolist() == [0.75, -0.25, 0.25 - 0.5]
    assert batch.header.credit == "trace"


def test_credit_by_trace_is_credit_by_rollout_where_a_rollout_has_one_trace() -> None:
    members = pair("g")
    plain, own = (
        batches(ticked(*members, learning=Learning("grpo", Grpo(scale="batch"), credit=credit)))[0] for credit in Credit
    )
    assert plain.advantages.tolist() == own.advantages.tolist()


def test_none_sends_rewards_groups_and_statistics_of_all_that_count() -> None:
    """A member that only counts is in the statistics, too; an ungraded one is named, never 0.0."""
    timeout = sample_trajectory("g-2", 0.25, status=TrajectoryStatus.TIMEOUT)
    lost = sample_trajectory("g-3", None)
    members = [m.replace(spec=SessionSpec(group_id="g", group_size=4)) for m in (*pair("g"), timeout, lost)]
    batch = batches(ticked(*members, learning=Learning("none", NoAdvantage())))[0]
    (group,) = batch.header.groups
    assert batch.header.advantage == "none"
    assert batch.advantages.tolist() == [0.0, 0.0]
    assert (group.rewards, group.size, group.failures) == ((1.0, 0.0, 0.25), 4, {"ungraded:deadline": 1})
    assert group.mean == pytest.approx(5 / 12)
    assert group.deviation == pytest.approx(np.std([1.0, 0.0, 0.25]))
    assert [row.reward for row in batch.header.table] == [1.0, 0.0]


def test_groups_and_rollouts_are_numbered_over_the_step() -> None:
    two = sample_trajectory("g1-0", 1.0, group="g1", traces=[sample_trace("g1-0", index=n) for n in range(2)])
    task = ticked(*pair("g0"), two, *pair("g1")[1:], groups_per_step=2, micro_batch=Size(10, 8192), world_size=2)
    named = [
        (batch.header.groups[group].group_id, session, batch.header.table[row].session_id)
        for batch in batches(task)
        for row, group, session in zip(batch.trace_index, batch.group_index, batch.session_index, strict=True)
        if row >= 0
    ]
    assert sorted(named) == [
        ("g0", 0, "g0-0"),
        ("g0", 1, "g0-1"),
        ("g1", 2, "g1-0"),
        ("g1", 2, "g1-0"),
        ("g1", 3, "g1-1"),
    ]


def test_extras_pass_through_beside_the_tokens() -> None:
    values = np.array([-0.5, -1.0, -2.0], np.float32)
    with_reference = sample_trajectory("g-0", traces=[sample_trace("g-0", extras={"ref_log_probs": values})])
    batch = batches(ticked(with_reference, *pair("g")[1:]))[0]
    assert batch.extras["ref_log_probs"].over(10).tolist() == [0, 0, -0.5, -1.0, -2.0, 0, 0, 0, 0, 0]
    assert batch.header.extras == {"ref_log_probs": "float32 [T]"}


def log_probs(mode: str, temperature: float = 1.0, top_p: float | None = None) -> dict[str, int]:
    trace = sample_trace("g-0")
    turn = trace.turns[0].replace(logprobs_mode=mode, temperature=temperature, top_p=top_p)
    return reasons(ticked(sample_trajectory("g-0", traces=[trace.replace(turns=(turn,))]), *pair("g")[1:]))


def test_b049_log_probs_that_a_trainer_cannot_reproduce_are_refused() -> None:
    """Logits 2 and 0 at temperature 1/2: -0.0181 was processed and trains, -0.1269 is raw and does not."""
    assert log_probs("processed", 0.5) == {}
    assert log_probs("raw", 0.5) == {"raw_log_probs": 3}
    assert log_probs("raw", 1.0) == {}
    assert log_probs("processed", 1.0, top_p=0.9) == {"filtered_log_probs": 3}


def test_b049_filtered_log_probs_train_where_that_is_declared() -> None:
    trace = sample_trace("g-0")
    turn = trace.turns[0].replace(logprobs_mode="processed", top_p=0.9)
    member = sample_trajectory("g-0", traces=[trace.replace(turns=(turn,))])
    assert len(header_of(ticked(member, *pair("g")[1:], filtered_log_probs=True)).table) == 2


def test_b052_all_members_are_accounted_for_where_one_is_over_long() -> None:
    members = [sample_trajectory(f"s{n}", float(n), size=8) for n in range(7)]
    long = sample_trajectory("s7", 1.0, size=8, traces=[sample_trace("s7", (Reply(tuple(range(100))),))])
    task = ticked(*members, long)
    header = header_of(task)
    assert (len(header.table), len(header.groups[0].rewards), reasons(task)) == (7, 8, {"too_large": 100})


def test_b061_a_rollout_of_three_traces_counts_once_in_the_baseline() -> None:
    forked = sample_trajectory("a", 1.0, traces=[sample_trace("a", index=n) for n in range(3)])
    batch = batches(ticked(forked, sample_trajectory("b", 0.0)))[0]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_b062_the_filter_of_equal_rewards_takes_forked_rollouts() -> None:
    forked = sample_trajectory("a", 1.0, traces=[sample_trace("a", index=n) for n in range(2)])
    group_rules = GroupRules(deadline_seconds=60.0, drop_zero_variance=True)
    assert chosen(ticked(forked, sample_trajectory("b", 0.0), groups=group_rules)) == [("g",)]
    assert reasons(ticked(forked, sample_trajectory("b", 1.0), groups=group_rules)) == {"zero_variance": 9}


def test_b065_each_failed_member_keeps_its_own_reason() -> None:
    """Two fine, one too long for its engine and without a trace, one whose sandbox failed."""
    members = [
        *pair("g"),
        sample_trajectory("g-2", None, traces=(), ungraded_reason="overlong_prompt"),
        sample_trajectory("g-3", None, ungraded_reason="sandbox"),
    ]
    sized = [m.replace(spec=SessionSpec(group_id="g", group_size=4)) for m in members]
    header = header_of(ticked(*sized))
    assert header.groups[0].failures == {"ungraded:overlong_prompt": 1, "ungraded:sandbox": 1}
    assert header.groups[0].rewards == (1.0, 0.0)


def test_b066_rewards_stay_with_their_sessions_whatever_comes_first() -> None:
    members = [sample_trajectory(f"s{n}", float(n), size=3) for n in range(3)]
    for order in ((2, 0, 1), (0, 1, 2)):
        batch = batches(ticked(*(members[n] for n in order)))[0]
        named = {batch.header.table[row].session_id: r for row, r in zip(batch.trace_index, batch.rewards, strict=True)}
        assert named == {"s0": 0.0, "s1": 1.0, "s2": 2.0}


def test_b067_every_rollout_is_in_exactly_the_step_that_trains_it() -> None:
    early = sample_trajectory("g2-0", group="g2")
    task = task_of(*pair("g1"), early)
    task.punctuate(110.0)
    task.feed(ACKS, StepAcknowledged(run="run", rank=0, world_size=1, step=0, batch_id="b", at=1.0))
    task.feed(TRAJECTORIES, sample_trajectory("g2-1", 0.0, group="g2"))
    task.punctuate(111.0)
    held = [[row.session_id for row in batch.header.table] for batch in batches(task)]
    assert held == [["g1-0", "g1-1"], ["g2-0", "g2-1"]]


def long_rollouts(count: int, forked: Sequence[int]) -> list[Trajectory]:
    return [
        sample_trajectory(
            f"s{n:03}",
            float(n % 2),
            size=count,
            traces=[sample_trace(f"s{n:03}", index=i) for i in range(3 if n in forked else 2)],
        )
        for n in range(count)
    ]


def test_b087_forked_rollouts_make_one_step_with_all_their_traces() -> None:
    """64 rollouts, one of them with three traces and 63 with two: 129 rows in one step, divided by real tokens."""
    task = ticked(*long_rollouts(64, forked=(5,)), world_size=2)
    rows = [row for batch in batches(task) for row in batch.trace_index.tolist() if row >= 0]
    assert sorted(rows) == list(range(129))
    assert header_of(task).denominators.tokens == 129 * 3


def test_b088_what_fills_up_a_rank_enters_no_denominator() -> None:
    members = [sample_trajectory(f"s{n}", float(n), size=3) for n in range(3)]
    task = ticked(*members, world_size=2, micro_batch=Size(5, 8192))
    found = batches(task)
    assert [batch.header.filler for batch in found].count(True) == 1
    assert sum(int(batch.loss_mask.sum()) for batch in found) == found[0].header.denominators.tokens == 9


def test_b090_figures_of_a_header_are_of_what_is_trained() -> None:
    cut_off = sample_trace("g-0", (Reply(tuple(range(1, 7))),), finish_reason="length")
    header = header_of(ticked(sample_trajectory("g-0", traces=[cut_off]), *pair("g")[1:]))
    assert [(row.tokens, row.mask_sum) for row in header.table] == [(8, 6), (5, 3)]


def test_b091_a_cut_of_failures_has_its_reasons_and_the_next_step_trains() -> None:
    dead = [sample_trajectory(f"d-{n}", None, group="d", opened_at=1.0, ungraded_reason="sandbox") for n in range(2)]
    task = ticked(*dead)
    assert chosen(task) == [()]
    assert reasons(task) == {"ungraded:sandbox": 6}
    for member in pair("g"):
        task.feed(TRAJECTORIES, member)
    task.punctuate(201.0)
    assert np.isfinite(batches(task)[0].advantages).all()


@pytest.mark.parametrize("filtered", [True, False])
def test_b092_rewards_that_are_all_equal_are_said_once(*, filtered: bool) -> None:
    alike = [m for n in range(MOST_IN_A_ROW + 5) for m in pair(f"g{n:02}", rewards=(0.25, 0.25))]
    group_rules = GroupRules(deadline_seconds=60.0, drop_zero_variance=filtered)
    with structlog.testing.capture_logs() as logs:
        task = ticked(*alike, groups=group_rules, groups_per_step=MOST_IN_A_ROW + 5)
    assert task.counts["equal_rewards"] == MOST_IN_A_ROW + 5
    assert [(line["log_level"], line["reward"], line["group"]) for line in logs] == [("warning", 0.25, "g49")]


def test_b092_one_group_that_differs_ends_the_row() -> None:
    alike = [m for n in range(MOST_IN_A_ROW) for m in pair(f"g{n:02}", rewards=(0.0, float(n == MOST_IN_A_ROW // 2)))]
    with structlog.testing.capture_logs() as logs:
        task = ticked(*alike, groups_per_step=MOST_IN_A_ROW)
    assert task.counts["equal_rewards"] == MOST_IN_A_ROW - 1
    assert logs == []


def test_b092_a_group_with_one_reward_says_nothing_about_it() -> None:
    task = ticked(*pair("g", rewards=(0.5, None)), learning=Learning("none", NoAdvantage()))
    assert "equal_rewards" not in task.counts


def test_a_truncated_rollout_that_does_not_count_trains_nothing() -> None:
    """One trace met the length limit; with ``exclude`` the other one has no advantage to be trained with."""
    sample_policy = replace(BATCHER_CONFIG.sample_policy, truncated=Treatment.EXCLUDE)
    cut_off = [sample_trace("g-0", finish_reason="length"), sample_trace("g-0", index=1)]
    members = [sample_trajectory("g-0", 1.0, traces=cut_off), *pair("g")[1:], sample_trajectory("g-2", 0.5)]
    sized = [m.replace(spec=SessionSpec(group_id="g", group_size=3)) for m in members]
    task = ticked(*sized, sample_policy=sample_policy)
    assert reasons(task) == {"truncated": 6}
    assert header_of(task).groups[0].failures == {"truncated": 1}


def test_dr_grpo_in_full_is_the_strategy_and_the_constant_weighting() -> None:
    batch = batches(ticked(*pair("g"), learning=Learning("dr_grpo", DrGrpo(), LossWeighting.CONSTANT, 100.0)))[0]
    assert batch.advantages.tolist() == [0.5, -0.5]
    np.testing.assert_allclose(batch.loss_weights, 0.01, rtol=1e-6)
    assert batch.header.denominators.weighted_tokens == 2.0
