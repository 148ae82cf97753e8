"""The reward-merger as a stage: joins, revisions, duplicates, conflicts, timers, late evaluations, partitions."""

from typing import Any

import numpy as np
import pytest

from rollmill.codec import JSON, decode, encode, header, read_manifest
from rollmill.models import (
    Evaluation,
    EvaluatorSpec,
    Manifest,
    PolicyVersion,
    Purpose,
    SessionSpec,
    SessionStatus,
    TokenRange,
    Trace,
    TraceTurn,
    Trajectory,
    VersionRun,
)
from rollmill.testing.memory_task import MemoryTask
from rollmill.topics import BUILT, EVALUATIONS, TRAJECTORIES, partition_of
from rollmill_reward_merger.stage import MAX_EVALUATIONS, RewardMergerStage
from rollmill_reward_merger.state import StateValue
from rollmill_reward_merger.timers import Windows

PARTITIONS = 4
HOME = partition_of(b"s1", PARTITIONS)
START = 1000.0
WINDOWS = Windows(revisions=600.0, markers=3600.0, orphans=7200.0)

Task = MemoryTask[StateValue]


@pytest.fixture
def task() -> Task:
    return MemoryTask(RewardMergerStage(partitions=PARTITIONS, windows=WINDOWS), partition=HOME)


def built(*evaluators: str, session_id: str = "s1", **changes: Any) -> Trajectory:
    spec = {"evaluators": tuple(EvaluatorSpec(strategy=name) for name in evaluators), **changes.pop("spec", {})}
    one = Trace(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([5, 6], np.int32),
        loss_mask=np.array([1, 1], np.uint8),
        response_logprobs=np.array([-0.5, -0.25], np.float32),
        versions=(VersionRun(PolicyVersion(0, 3), 2),),
        turns=(TraceTurn(completion_id="c1", start=0, stop=2),),
    )
    values = {"closed_at": START, "traces": (one,), "status": SessionStatus.COMPLETED, **changes}
    return Trajectory(session_id=session_id, spec=SessionSpec(evaluation_seconds=60.0, **spec), **values)


def evaluated(name: str = "e1", evaluator: str = "judge", *, session_id: str = "s1", **values: Any) -> Evaluation:
    return Evaluation(evaluation_id=name, session_id=session_id, evaluator=evaluator, **{"at": START + 1.0, **values})


def out(task: Task) -> list[Trajectory]:
    values = [(emit.value, emit.headers) for emit in task.of(TRAJECTORIES)]
    return [decode(Trajectory, value, headers) for value, headers in values if isinstance(value, bytes)]


def read_back(task: Task) -> list[Evaluation]:
    """Feed the timers' records to the task, as Kafka would; what was fed."""
    asked = [emit.value for emit in task.of(EVALUATIONS) if isinstance(emit.value, Evaluation)]
    for record in asked:
        task.feed(EVALUATIONS, record)
    task.emitted = [emit for emit in task.emitted if emit.topic is not EVALUATIONS]
    return asked


def summary(task: Task) -> list[tuple[int | None, float | None, str | None]]:
    return [(item.revision, item.outcome_reward, item.ungraded_reason) for item in out(task)]


def reasons(task: Task) -> list[str]:
    return [error.reason for _, error in task.dead_letters]


@pytest.mark.parametrize("evaluation_first", [False, True])
def test_built_and_evaluation_join_in_either_order(task: Task, *, evaluation_first: bool) -> None:
    steps = [(BUILT, built("judge")), (EVALUATIONS, evaluated(outcome_reward=0.0))]
    for topic, record in reversed(steps) if evaluation_first else steps:
        task.feed(topic, record)
    assert summary(task) == [(0, 0.0, None)]
    (emit,) = task.of(TRAJECTORIES)
    assert emit.key == "s1"
    manifest = read_manifest(emit.headers)
    assert manifest is not None
    assert manifest.units == (TokenRange("c1", 0, 0, 2, PolicyVersion(0, 3)),)
    assert task.counts["graded"] == 1


def test_without_evaluators_revision_0_comes_at_once(task: Task) -> None:
    task.feed(BUILT, built())
    assert summary(task) == [(0, None, "no_evaluator")]
    task.feed(EVALUATIONS, evaluated("h1", "human", outcome_reward=1.0))
    assert summary(task)[1:] == [(1, 1.0, None)]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_every_purpose_is_merged(task: Task, purpose: Purpose) -> None:
    task.feed(BUILT, built("judge", spec={"purpose": purpose}))
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    assert summary(task) == [(0, 1.0, None)]
    assert out(task)[0].spec.purpose is purpose


def test_revision_0_waits_for_every_evaluator(task: Task) -> None:
    task.feed(BUILT, built("judge", "tests"))
    task.feed(EVALUATIONS, evaluated("a", "judge", outcome_reward=1.0))
    assert out(task) == []
    task.feed(EVALUATIONS, evaluated("b", "tests", outcome_reward=0.0))
    assert summary(task) == [(0, 0.5, None)]


def test_a_revision_between_evaluation_and_built_comes_out_in_order(task: Task) -> None:
    task.feed(EVALUATIONS, evaluated("a", outcome_reward=0.5))
    task.feed(EVALUATIONS, evaluated("b", outcome_reward=0.75, supersedes="a"))
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated("c", outcome_reward=0.25, supersedes="b"))
    assert summary(task) == [(0, 0.5, None), (1, 0.75, None), (2, 0.25, None)]


def test_duplicates_are_counted_and_change_nothing(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=0.5, duration_seconds=1.0, version="1"))
    before = dict(task.changelog)
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=0.5, at=2000.0, duration_seconds=9.0, version="2"))
    assert task.counts["duplicates"] == 2
    assert task.changelog == before
    assert len(out(task)) == 1
    assert task.dead_letters == []


def test_the_same_id_with_another_reward_is_a_conflict(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=0.5))
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    task.feed(BUILT, built("judge", error="another"))
    assert reasons(task) == ["conflict", "conflict"]
    assert summary(task) == [(0, 0.5, None)]


@pytest.mark.parametrize("closed", [False, True])
def test_work_that_was_repeated_with_another_result_is_a_duplicate(task: Task, *, closed: bool) -> None:
    """An evaluator killed between its answer and its commit asks a judge twice: the first answer counts (rule V1)."""
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=0.7, repeatable=True))
    if closed:
        task.punctuate(START + 602.0)
        read_back(task)
    for again in ({"outcome_reward": 0.8}, {"not_graded": "judge_unparsable"}):
        task.feed(EVALUATIONS, evaluated(repeatable=True, **again))
    assert summary(task) == [(0, 0.7, None)]
    assert task.dead_letters == []
    assert task.counts["repeats_with_another_result"] == 2


def test_attempts_of_one_session_are_sessions_of_their_own(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.feed(BUILT, built("judge", attempt=2))
    task.feed(EVALUATIONS, evaluated("b", outcome_reward=1.0, attempt=2))
    assert [(item.attempt, item.revision) for item in out(task)] == [(2, 0)]


def test_the_deadline_is_a_record_that_is_read_back(task: Task) -> None:
    task.feed(BUILT, built("judge", "tests"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    task.punctuate(START + 59.0)
    assert task.of(EVALUATIONS) == []
    task.punctuate(START + 61.0)
    (emit,) = task.of(EVALUATIONS)
    assert emit.partition == HOME
    assert isinstance(emit.value, Evaluation)
    assert (emit.value.final, emit.value.not_graded, emit.value.at) == (True, "deadline", START + 60.0)
    assert out(task) == []
    read_back(task)
    assert summary(task) == [(0, None, "deadline")]


def test_a_deadline_is_asked_for_once_and_again_only_if_it_never_comes_back(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    for now in (61.0, 61.25, 62.5, 70.0):
        task.punctuate(START + now)
    assert len(task.of(EVALUATIONS)) == 1
    task.punctuate(START + 95.0)
    first, second = task.of(EVALUATIONS)
    assert first == second
    read_back(task)
    assert summary(task) == [(0, None, "deadline")]
    assert task.counts["duplicates"] == 1


def test_an_answer_that_was_in_the_log_before_the_deadline_wins(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.punctuate(START + 61.0)
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0, at=START + 60.5))
    read_back(task)
    assert summary(task) == [(0, 1.0, None)]
    assert task.counts["timers_ignored"] == 1


def test_a_late_answer_revises_the_deadline(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.punctuate(START + 61.0)
    read_back(task)
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0, at=START + 90.0))
    assert summary(task) == [(0, None, "deadline"), (1, 1.0, None)]


@pytest.mark.parametrize("closed_at", [0.0, 1e12])
def test_a_session_without_a_credible_time_has_its_deadline_from_first_sight(task: Task, closed_at: float) -> None:
    task.feed(BUILT, built("judge", closed_at=closed_at))
    task.punctuate(START)
    task.punctuate(START + 59.0)
    assert task.of(EVALUATIONS) == []
    task.punctuate(START + 61.0)
    assert len(task.of(EVALUATIONS)) == 1


def test_revisions_close_then_only_a_marker_stays_then_nothing(task: Task) -> None:
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    task.punctuate(START + 2.0 + WINDOWS.revisions)
    assert [item.evaluator for item in read_back(task)] == ["revisions_closed"]
    assert [key for key, _ in task.state.items()] == ["s1:1/closed"]
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    task.feed(BUILT, built("judge"))
    assert task.counts["duplicates"] == 2
    task.feed(EVALUATIONS, evaluated("e2", outcome_reward=0.0, supersedes="e1"))
    task.feed(BUILT, built("judge", error="another"))
    assert reasons(task) == ["late_evaluation", "conflict"]
    task.punctuate(START + 3.0 + WINDOWS.revisions + WINDOWS.markers)
    assert [item.evaluator for item in read_back(task)] == ["forgotten"]
    assert len(task.state) == 0
    assert task.changelog == {}
    assert summary(task) == [(0, 1.0, None)]


def test_closing_in_the_log_before_built_is_read_loses_nothing(task: Task) -> None:
    first: Task = MemoryTask(task.stage, partition=HOME)
    first.feed(BUILT, built("judge"))
    first.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    first.punctuate(START + 2.0 + WINDOWS.revisions)
    (closing,) = [emit.value for emit in first.of(EVALUATIONS)]
    for record in (evaluated(outcome_reward=1.0), closing, evaluated("e2", outcome_reward=0.0)):
        task.feed(EVALUATIONS, record)
    assert reasons(task) == ["late_evaluation"]
    task.feed(BUILT, built("judge"))
    assert summary(task) == [(0, 1.0, None)]
    assert [key for key, _ in task.state.items()] == ["s1:1/closed"]


def test_evaluations_of_a_session_that_never_comes_are_forgotten(task: Task) -> None:
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    task.punctuate(START)
    task.punctuate(START + WINDOWS.orphans + 1.0)
    assert [item.evaluator for item in read_back(task)] == ["forgotten"]
    assert len(task.state) == 0
    assert task.counts["evaluations_orphaned"] == 1


def test_a_misplaced_evaluation_is_sent_on_with_its_bytes(task: Task) -> None:
    wrong = (HOME + 1) % PARTITIONS
    value = encode(evaluated(outcome_reward=1.0), JSON)
    task.feed(EVALUATIONS, value, partition=wrong, headers=(("who", b"grader"),))
    (emit,) = task.of(EVALUATIONS)
    assert (emit.partition, emit.key, emit.value) == (HOME, "s1", value)
    assert header(emit.headers, "who") == b"grader"
    assert header(emit.headers, "content-type") == JSON.encode()
    assert task.counts["evaluations_sent_on"] == 1
    assert len(task.state) == 0
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, value, headers=emit.headers)
    assert summary(task) == [(0, 1.0, None)]
    task.feed(EVALUATIONS, value, partition=wrong, headers=emit.headers)
    assert [error.reason for _, error in task.dead_letters] == ["wrong_partition"]


def test_a_misplaced_trajectory_is_a_dead_letter_with_advice(task: Task) -> None:
    task.feed(BUILT, built("judge"), partition=(HOME + 1) % PARTITIONS)
    ((_, error),) = task.dead_letters
    assert error.reason == "wrong_partition"
    assert "murmur2" in error.detail
    assert out(task) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{not json", "malformed"),
        (b'{"session_id": "s1"}', "invalid"),
        (b'{"evaluation_id":"e","session_id":"s1","evaluator":"j","outcome_reward":true}', "invalid"),
        (b'{"evaluation_id":"e","session_id":"s1","evaluator":"j","outcome_reward":1,"not_graded":"x"}', "invalid"),
        (None, "tombstone"),
    ],
)
def test_a_poison_evaluation_is_set_aside_and_the_next_one_counts(task: Task, value: bytes, reason: str) -> None:
    task.feed(BUILT, built("judge"))
    task.feed(EVALUATIONS, value)
    task.feed(EVALUATIONS, evaluated(outcome_reward=1.0))
    assert reasons(task) == [reason]
    assert summary(task) == [(0, 1.0, None)]


def test_one_session_takes_a_bounded_number_of_evaluations(task: Task) -> None:
    for number in range(MAX_EVALUATIONS + 1):
        task.feed(EVALUATIONS, evaluated(f"e{number}", outcome_reward=1.0))
    assert reasons(task) == ["too_many_evaluations"]


def test_state_restored_from_the_changelog_is_the_live_state(task: Task) -> None:
    task.feed(BUILT, built("judge", "tests"))
    for number in range(12):
        task.feed(EVALUATIONS, evaluated(f"e{number}", outcome_reward=number / 10, metadata={"n": number}))
    task.feed(EVALUATIONS, evaluated("x", session_id=_neighbour(), not_graded="lost"))
    assert dict(task.restored().items()) == dict(task.state.items())
    task.punctuate(START + 61.0)
    read_back(task)
    task.punctuate(START + 62.0 + WINDOWS.revisions)
    read_back(task)
    assert dict(task.restored().items()) == dict(task.state.items())


def _neighbour() -> str:
    return next(f"n{i}" for i in range(100) if partition_of(f"n{i}".encode(), PARTITIONS) == HOME)


def test_the_units_that_a_waiting_session_holds_are_written_with_its_state(task: Task) -> None:
    effects = task.feed(BUILT, built("judge"))
    (delta,) = effects.updates
    assert delta.manifest == built().manifest


def test_what_went_on_is_no_longer_held_although_a_copy_stays() -> None:
    task: Task = MemoryTask(RewardMergerStage(partitions=PARTITIONS, windows=WINDOWS), partition=HOME)
    task.feed(BUILT, built("judge", "critic"))
    (first,) = task.feed(EVALUATIONS, evaluated("e1", outcome_reward=1.0)).updates
    (last,) = task.feed(EVALUATIONS, evaluated("e2", "critic", outcome_reward=0.0)).updates
    assert first.manifest is None
    assert last.manifest == Manifest(session_id="s1", attempt=1)


def test_a_session_that_waits_for_nothing_is_never_held(task: Task) -> None:
    (delta,) = task.feed(BUILT, built()).updates
    assert delta.manifest is None
