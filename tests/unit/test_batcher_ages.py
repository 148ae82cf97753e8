"""Staleness at its boundaries: bases, actions, waiting, and a policy that jumps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmill.models import (
    PolicyAnnouncement,
    PolicyVersion,
    StalenessBasis,
    StepAcknowledged,
    TokenDisposition,
    TokenRange,
    Trajectory,
)
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import ACKS, BATCHES, OUTCOMES, POLICIES, REFILLS, TRAJECTORIES
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning, Size
from rollmill_batcher.groups.staleness import PolicyClock, Staleness, StalenessAction
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo

BATCHER_CONFIG = BatcherConfig(
    run="run",
    policy="policy",
    learning=Learning("dr_grpo", DrGrpo()),
    groups=GroupRules(deadline_seconds=60.0),
    groups_per_step=1,
    micro_batch=Size(64, 8192),
)
Task = MemoryTask[StateValue]

OLD, NEW = Reply((5,), PolicyVersion(0, 2)), Reply((6, 7, 8), PolicyVersion(0, 6))
"""One token of version 2, three of version 6: at version 7 the ages are 5 and 1, 2 in the mean."""


def task_of(limit: int | None, version: int, *members: Trajectory, **staleness: Any) -> Task:
    task: Task = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, staleness=Staleness(limit, **staleness))))
    announce(task, version)
    for member in members:
        task.feed(TRAJECTORIES, member)
    return task


def announce(task: Task, version: int) -> None:
    task.feed(POLICIES, PolicyAnnouncement(version=PolicyVersion(0, version), at=1.0))


def pair(*replies: Reply, group: str = "g") -> tuple[Trajectory, Trajectory]:
    names = (f"{group}-a", f"{group}-b")
    first, second = (
        sample_trajectory(name, reward, group=group, traces=[sample_trace(name, replies)])
        for name, reward in zip(names, (1.0, 0.0), strict=True)
    )
    return first, second


def batches(task: Task) -> list[PackedBatch]:
    return [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]


def dispositions(task: Task) -> list[TokenDisposition]:
    return [emit.value for emit in task.of(OUTCOMES) if isinstance(emit.value, TokenDisposition)]


@pytest.mark.parametrize(
    ("basis", "limit", "trains"),
    [
        (StalenessBasis.OLDEST, 5, True),
        (StalenessBasis.OLDEST, 4, False),
        (StalenessBasis.NEWEST, 1, True),
        (StalenessBasis.NEWEST, 0, False),
        (StalenessBasis.MEAN, 2, True),
        (StalenessBasis.MEAN, 1, False),
    ],
)
def test_each_basis_at_its_limit_and_one_over(basis: StalenessBasis, limit: int, *, trains: bool) -> None:
    task = task_of(limit, 7, *pair(OLD, NEW), basis=basis)
    task.punctuate(200.0)
    assert bool(batches(task)) is trains
    assert {each.reason for each in dispositions(task)} == (set() if trains else {"stale"})


def test_b073_one_update_is_one_version_of_age() -> None:
    """Sampled at 0, limit 1: version 1 is age 1 and inside, version 2 is age 2 and out, once."""
    ages = [PolicyClock(PolicyVersion(0, version)).age(PolicyVersion(0, 0)) for version in (0, 1, 2)]
    assert ages == [0, 1, 2]
    assert [Staleness(1).drops(age) for age in ages] == [False, False, True]


def test_b074_what_waits_until_the_version_rises_is_dropped_before_it_ships() -> None:
    """Finished at 5 with limit 3: ships at 8, is dropped at 9."""
    for version, shipped in ((8, True), (9, False)):
        task = task_of(3, 5, *pair(Reply((5, 6), PolicyVersion(0, 5))))
        announce(task, version)
        task.punctuate(200.0)
        assert bool(batches(task)) is shipped
        assert sum(each.tokens for each in dispositions(task) if each.reason == "stale") == (0 if shipped else 4)


def test_b053_context_has_no_version_and_never_makes_a_trace_old() -> None:
    """Versions -, -, 3, 3, -, 4, 4 with mask 0, 0, 1, 1, 0, 1, 1: 3 to 4, and the prompt ends at 2."""
    replies = (Reply((5, 6), PolicyVersion(0, 3), then=(9,)), Reply((7, 8), PolicyVersion(0, 4)))
    trace = sample_trace("s", replies, prompt=(1, 2))
    clock = PolicyClock(PolicyVersion(0, 4))
    assert [clock.age_of(trace, basis) for basis in StalenessBasis] == [1, 0, 0.5]
    assert (len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.response_ids)) == (2, 7)


def test_a_jump_of_ten_versions_drops_what_is_too_old_and_says_so() -> None:
    task = task_of(4, 0, *pair(Reply((5, 6), PolicyVersion(0, 0)), group="g0"))
    announce(task, 10)
    for member in pair(Reply((5,), PolicyVersion(0, 10)), group="g1"):
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    (batch,) = batches(task)
    assert {row.group_id for row in batch.header.table} == {"g1"}
    assert sorted((each.session_id, each.reason, each.tokens) for each in dispositions(task)) == [
        ("g0-a", "stale", 2),
        ("g0-b", "stale", 2),
    ]
    assert [(emit.key, emit.value.reason) for emit in task.of(REFILLS)] == [("g0", "stale")]  # type: ignore[union-attr]  # a model


def test_mask_trains_the_tokens_inside_the_limit_and_names_the_others() -> None:
    task = task_of(4, 7, *pair(OLD, NEW), action=StalenessAction.MASK)
    task.punctuate(200.0)
    (batch,) = batches(task)
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert batch.behavior_log_probs.tolist()[:4] == [0.0, 0.0, 0.0, -6 / 64]
    (row, _) = batch.header.table
    assert (row.mask_sum, row.oldest) == (3, PolicyVersion(0, 6))
    assert row.units == (TokenRange("call-g-a-0-1", 0, 0, 3, PolicyVersion(0, 6)),)
    assert batch.header.denominators.tokens == 6
    assert [(each.reason, each.units) for each in dispositions(task) if each.session_id == "g-a"] == [
        ("stale", (TokenRange("call-g-a-0-0", 0, 0, 1, PolicyVersion(0, 2)),))
    ]


def test_mask_drops_a_trace_without_a_token_inside_the_limit() -> None:
    task = task_of(0, 7, *pair(OLD, NEW), action=StalenessAction.MASK)
    task.punctuate(200.0)
    assert not batches(task)
    assert sum(each.tokens for each in dispositions(task)) == 8


def test_weight_leaves_nothing_out_and_divides_by_age_plus_one() -> None:
    task = task_of(4, 7, *pair(OLD), action=StalenessAction.WEIGHT)
    task.punctuate(200.0)
    (batch,) = batches(task)
    np.testing.assert_allclose(batch.loss_weights, 1 / (5 + 1), rtol=1e-6)
    assert batch.header.denominators.weighted_tokens == pytest.approx(2 / 6)
    assert batch.header.max_staleness is None
    assert not dispositions(task)


def test_keep_lets_everything_train() -> None:
    task = task_of(0, 7, *pair(OLD), action=StalenessAction.KEEP)
    task.punctuate(200.0)
    (batch,) = batches(task)
    assert batch.loss_weights.tolist() == [1.0, 1.0]
    assert batch.header.max_staleness is None


def test_the_header_parts_generation_age_from_queue_age() -> None:
    task = task_of(None, 7, *pair(OLD, NEW))
    task.punctuate(200.0)
    header = batches(task)[0].header
    assert header.generation_ages == {4: 2}
    assert header.queue_ages == {1: 2}
    assert header.staleness_histogram == {1: 6, 5: 2}


@pytest.mark.parametrize(("basis", "last"), [("oldest", 7), ("newest", 11), ("mean", 10)])
def test_the_gate_at_hand_over_judges_by_the_basis_of_the_cut(basis: str, last: int) -> None:
    """Limit 5: the versions 2 and 6 grow old at the hand-over as they do at a cut."""
    task = task_of(5, 7, *pair(OLD, NEW), basis=StalenessBasis(basis))
    task.punctuate(200.0)
    header = batches(task)[0].header
    assert filter_step(header, PolicyVersion(0, last), {}).cleared == 0
    assert filter_step(header, PolicyVersion(0, last + 1), {}).cleared == 2


def test_traces_are_counted_by_length_and_those_dropped_among_them() -> None:
    task = task_of(4, 7, *pair(OLD, group="g0"), *pair(NEW, group="g1"))
    task.punctuate(200.0)
    assert task.counts["traces_to_1024"] == 4
    assert task.counts["traces_stale_to_1024"] == 2


def test_a_queued_step_ages_what_waits_behind_it() -> None:
    fresh = Reply((5,), PolicyVersion(0, 7))
    task: Task = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, staleness=Staleness(0), steps_ahead=2)))
    announce(task, 7)
    for member in (*pair(fresh, group="g0"), *pair(fresh, group="g1")):
        task.feed(TRAJECTORIES, member)
    task.punctuate(200.0)
    task.punctuate(201.0)
    assert [row.group_id for batch in batches(task) for row in batch.header.table] == ["g0", "g0"]
    assert {each.reason for each in dispositions(task)} == {"stale"}
    task.feed(ACKS, StepAcknowledged(run="run", rank=0, world_size=1, step=0, batch_id="b", at=1.0))
    assert not task.punctuate(202.0)
