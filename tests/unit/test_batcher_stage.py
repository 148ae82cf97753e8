"""The batcher as a stage: intake, cuts, outcomes, markers, flow control."""

from dataclasses import replace
from typing import Any

import pytest

from rollmill.codec import JSON, encode
from rollmill.errors import ConfigurationError
from rollmill.models import (
    Cut,
    EndOfStream,
    PolicyAnnouncement,
    PolicyVersion,
    Purpose,
    Rewound,
    StepAcknowledged,
    TokenDisposition,
    TokenRange,
    Trajectory,
)
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import ACKS, BATCHES, CUTS, OUTCOMES, POLICIES, TRAJECTORIES
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning, Size
from rollmill_batcher.groups.group import GroupState
from rollmill_batcher.groups.staleness import Staleness
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import ClosedGroupMarker, StateValue, find_marker, progress_of
from rollmill_batcher.steps.advantages import Grpo

BATCHER_CONFIG = BatcherConfig(
    run="run",
    policy="policy",
    learning=Learning("grpo", Grpo(scale="none")),
    groups=GroupRules(deadline_seconds=60.0, late_window_seconds=600.0),
    groups_per_step=1,
    micro_batch=Size(64, 4096),
)

Task = MemoryTask[StateValue]


def task_of(**changes: Any) -> Task:
    return MemoryTask(BatcherStage(replace(BATCHER_CONFIG, **changes)))


def feed(task: Task, *members: Trajectory) -> None:
    for number, member in enumerate(members):
        task.feed(TRAJECTORIES, member, partition=number % 3)


def pair(group: str, first: float | None = 1.0, second: float | None = 0.0, **fields: Any) -> tuple[Trajectory, ...]:
    return (
        sample_trajectory(f"{group}-a", first, group=group, **fields),
        sample_trajectory(f"{group}-b", second, group=group, **fields),
    )


def announce(task: Task, version: int, epoch: int = 0, **fields: Any) -> None:
    task.feed(POLICIES, PolicyAnnouncement(version=PolicyVersion(epoch, version), at=1.0, **fields))


def acknowledge(task: Task, step: int, rank: int = 0, world_size: int = 1) -> None:
    event = StepAcknowledged(run="run", rank=rank, world_size=world_size, step=step, batch_id="b", at=1.0)
    task.feed(ACKS, event)


def batches(task: Task) -> list[PackedBatch]:
    return [read_batch(emit.value) for emit in task.of(BATCHES) if isinstance(emit.value, bytes)]


def cuts(task: Task) -> list[Cut]:
    return [emit.value for emit in task.of(CUTS) if isinstance(emit.value, Cut)]


def excluded(task: Task) -> dict[str, list[str]]:
    """Sessions by reason."""
    found: dict[str, list[str]] = {}
    for emit in task.of(OUTCOMES):
        assert isinstance(emit.value, TokenDisposition)
        found.setdefault(emit.value.reason or "", []).append(emit.value.session_id)
    return {reason: sorted(sessions) for reason, sessions in found.items()}


def marker(task: Task, group: str) -> ClosedGroupMarker:
    found = find_marker(task.state, group)
    assert found is not None
    return found


def same_state(task: Task) -> bool:
    return dict(task.restored().items()) == dict(task.state.items())


def test_a_complete_group_becomes_a_step() -> None:
    task = task_of()
    announce(task, 3)
    feed(task, *pair("g", version=PolicyVersion(0, 2)))
    task.punctuate(200.0)
    (batch,) = batches(task)
    header = batch.header
    assert batch.input_ids.tolist() == [1, 2, 5, 6, 7] * 2
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert (header.step, header.micro_batches, header.policy_version) == (0, 1, PolicyVersion(0, 3))
    assert (header.denominators.tokens, header.denominators.rollouts) == (6, 2)
    assert header.staleness_histogram == {1: 6}
    assert [row.session_id for row in header.table] == ["g-a", "g-b"]
    assert header.table[0].units == (TokenRange("call-g-a-0-0", 0, 0, 3, PolicyVersion(0, 2)),)
    (emit,) = task.of(BATCHES)
    assert (emit.key, emit.partition) == ("000000000000/000000", 0)


def test_the_cut_says_what_it_was_made_from_and_what_it_made() -> None:
    task = task_of()
    announce(task, 3)
    feed(task, *pair("g"))
    task.punctuate(200.0)
    (cut,) = cuts(task)
    assert cut.positions == {"policies/0": 1, "trajectories/0": 1, "trajectories/1": 1}
    assert (cut.step, cut.sequence, cut.groups, cut.excluded) == (0, 0, ("g",), {})
    assert cut.batch_id == batches(task)[0].header.batch_id
    assert (cut.now, cut.policy_version) == (200.0, PolicyVersion(0, 3))


def test_nothing_is_cut_and_nothing_written_while_a_group_is_open() -> None:
    task = task_of()
    feed(task, sample_trajectory("a"))
    assert not task.punctuate(110.0)
    assert not task.of(CUTS)


def test_members_leave_the_state_once_their_step_is_acknowledged_and_a_marker_stays() -> None:
    task = task_of()
    feed(task, *pair("g"))
    task.punctuate(200.0)
    assert "group:g" in task.state
    assert len(cuts(task)) == 1
    acknowledge(task, 0)
    assert not {"group:g", "step:000000000000"} & {key for key, _ in task.state.items()}
    assert marker(task, "g").state is GroupState.CUT
    assert marker(task, "g").sessions == (("g-a", 1), ("g-b", 1))
    assert not excluded(task)
    assert same_state(task)


def test_a_repeat_of_a_trained_member_is_no_late_member() -> None:
    task = task_of()
    feed(task, *pair("g"))
    task.punctuate(200.0)
    feed(task, *pair("g"), sample_trajectory("g-a", 0.3, group="g", revision=1))
    assert not excluded(task)
    assert task.counts["duplicates"] == 2
    assert task.counts["revisions_after_cut"] == 1


def test_a_late_member_is_named_once() -> None:
    task = task_of()
    feed(task, *pair("g"))
    task.punctuate(200.0)
    late = sample_trajectory("g-c", group="g")
    feed(task, late, late)
    assert excluded(task) == {"late_for_group": ["g-c"]}
    assert task.counts["late_for_group"] == 1
    assert same_state(task)


def test_a_second_attempt_after_the_cut_is_late() -> None:
    task = task_of()
    feed(task, *pair("g"))
    task.punctuate(200.0)
    feed(task, sample_trajectory("g-a", group="g", attempt=2))
    assert excluded(task) == {"late_for_group": ["g-a"]}


def test_a_second_attempt_before_the_cut_supersedes() -> None:
    task = task_of()
    feed(task, *pair("g"), sample_trajectory("g-a", 0.5, group="g", attempt=2))
    task.punctuate(200.0)
    assert excluded(task) == {"superseded": ["g-a"]}
    assert [(row.session_id, row.attempt) for row in batches(task)[0].header.table] == [("g-a", 2), ("g-b", 1)]


def test_the_newest_revision_before_the_cut_counts() -> None:
    task = task_of()
    feed(task, *pair("g"), sample_trajectory("g-b", 0.8, group="g", revision=1), *pair("g")[1:])
    task.punctuate(200.0)
    assert batches(task)[0].rewards.tolist() == pytest.approx([1.0, 0.8])
    assert same_state(task)


def test_one_revision_with_two_contents_is_a_dead_letter() -> None:
    task = task_of()
    feed(task, sample_trajectory("a", 0.0), sample_trajectory("b"), sample_trajectory("a", 0.0))
    task.feed(TRAJECTORIES, sample_trajectory("a", 1.0))
    assert [error.reason for _, error in task.dead_letters] == ["conflict"]
    assert task.counts["duplicates"] == 1


def test_steps_take_whole_groups_oldest_first_and_leave_the_rest() -> None:
    task = task_of(groups_per_step=2)
    for number, opened in enumerate((30.0, 10.0, 20.0)):
        feed(task, *pair(f"g{number}", opened_at=opened))
    task.punctuate(200.0)
    assert cuts(task)[0].groups == ("g1", "g2")
    assert "group:g0" in task.state


def test_b068_what_a_step_does_not_need_waits_in_its_order() -> None:
    task = task_of(groups_per_step=4)
    names = [f"g{number}" for number in range(10)]
    for opened, name in enumerate(names):
        feed(task, *pair(name, opened_at=float(opened)))
    for step in range(2):
        task.punctuate(200.0 + step)
        acknowledge(task, step)
    assert [cut.groups for cut in cuts(task)] == [tuple(names[:4]), tuple(names[4:8])]
    assert [name for name in names if f"group:{name}" in task.state] == names[8:]


def test_no_step_goes_beyond_what_the_trainer_has_acknowledged() -> None:
    task = task_of()
    for name in ("g0", "g1", "g2"):
        feed(task, *pair(name))
    task.punctuate(200.0)
    assert not task.punctuate(201.0)
    acknowledge(task, 0)
    task.punctuate(202.0)
    assert [cut.step for cut in cuts(task)] == [0, 1]


def test_a_step_is_acknowledged_by_all_ranks() -> None:
    task = task_of(world_size=2)
    for name in ("g0", "g1"):
        feed(task, *pair(name))
    task.punctuate(200.0)
    acknowledge(task, 0, rank=1, world_size=2)
    assert not task.punctuate(201.0)
    acknowledge(task, 0, rank=0, world_size=2)
    assert task.punctuate(202.0)


def test_a_rewind_opens_steps_again() -> None:
    task = task_of()
    for name in ("g0", "g1", "g2"):
        feed(task, *pair(name))
    for step in (0, 1):
        task.punctuate(200.0 + step)
        acknowledge(task, step)
    task.feed(ACKS, Rewound(run="run", next_step=1, rank=0, at=1.0))
    assert progress_of(task.state).queued_steps == 1
    assert not task.punctuate(210.0)
    acknowledge(task, 1)
    task.punctuate(211.0)
    assert [cut.step for cut in cuts(task)] == [0, 1, 2]


def test_staleness_counts_the_steps_still_queued() -> None:
    task = task_of(steps_ahead=2, staleness=Staleness(1))
    announce(task, 1)
    feed(task, *pair("g0"))
    task.punctuate(200.0)
    feed(task, *pair("g1"))
    task.punctuate(201.0)
    assert batches(task)[0].header.staleness_histogram == {1: 6}
    assert excluded(task) == {"stale": ["g1-a", "g1-b"]}
    assert [(cut.step, cut.batch_id is None, cut.excluded) for cut in cuts(task)] == [
        (0, False, {}),
        (1, True, {"stale": 6}),
    ]


def test_a_stale_member_counts_and_does_not_train() -> None:
    task = task_of(staleness=Staleness(2))
    announce(task, 3)
    old, new = pair("g")[0], pair("g", version=PolicyVersion(0, 3))[1]
    feed(task, old, new)
    task.punctuate(200.0)
    (batch,) = batches(task)
    assert batch.advantages.tolist() == [-0.5]
    assert [row.session_id for row in batch.header.table] == ["g-b"]
    assert excluded(task) == {"stale": ["g-a"]}


def test_a_trace_of_a_rollout_is_stale_alone() -> None:
    task = task_of(staleness=Staleness(1))
    announce(task, 2)
    traces = [sample_trace("g-a", (Reply(version=PolicyVersion(0, v)),), index=v) for v in (0, 2)]
    feed(task, sample_trajectory("g-a", group="g", traces=traces), *pair("g", version=PolicyVersion(0, 2))[1:])
    task.punctuate(200.0)
    assert [(row.session_id, row.trace) for row in batches(task)[0].header.table] == [("g-a", 1), ("g-b", 0)]
    (disposition,) = [emit.value for emit in task.of(OUTCOMES) if isinstance(emit.value, TokenDisposition)]
    assert disposition.units == traces[0].units()


# B081
def test_a_group_expires_with_too_few_and_is_taken_with_enough() -> None:
    task = task_of()
    feed(task, sample_trajectory("a", group="few", size=3))
    feed(task, *pair("enough", size=3))
    task.punctuate(159.0)
    assert not cuts(task)
    task.punctuate(160.0)
    assert excluded(task) == {"group_expired": ["a"]}
    assert cuts(task)[0].groups == ("enough",)
    assert marker(task, "few").state is GroupState.EXPIRED


def test_time_stands_still_until_the_backlog_is_read() -> None:
    task = task_of()
    feed(task, pair("g", size=2)[0])
    assert not task.punctuate(10_000.0, caught_up=False)
    feed(task, *pair("g", size=2))
    task.punctuate(10_001.0, caught_up=False)
    assert cuts(task)[0].groups == ("g",)
    assert not excluded(task)


def test_f8_a_day_of_which_the_log_is_not_read_yet_closes_no_group() -> None:
    """A cut-off of the broker, a machine that slept: members that ended in time wait in the log."""
    task = task_of()
    first, second, *others = [sample_trajectory(f"m{number}", float(number), group="g", size=4) for number in range(4)]
    feed(task, first, second)
    assert not task.punctuate(120.0)  # it has kept up before
    assert not task.punctuate(120.0 + 86_400, caught_up=False)
    feed(task, *others)
    task.punctuate(120.0 + 86_400)
    assert [cut.groups for cut in cuts(task)][-1:] == [("g",)]
    assert "late_for_group" not in excluded(task)


def test_what_is_not_graded_is_excluded_with_its_reason() -> None:
    task = task_of()
    feed(task, *pair("g", size=3), sample_trajectory("g-c", None, group="g", size=3, ungraded_reason="sandbox"))
    task.punctuate(200.0)
    assert excluded(task) == {"ungraded:sandbox": ["g-c"]}
    assert batches(task)[0].header.denominators.rollouts == 2


def test_a_group_with_one_graded_member_is_too_small_and_the_next_one_trains() -> None:
    task = task_of()
    feed(task, *pair("g0", 1.0, None), *pair("g1"))
    task.punctuate(200.0)
    assert excluded(task) == {"group_too_small": ["g0-a"], "ungraded:deadline": ["g0-b"]}
    assert cuts(task)[0].groups == ("g1",)


def test_a_step_without_anything_to_train_is_a_cut_without_a_batch() -> None:
    task = task_of()
    feed(task, *pair("g", None, None))
    task.punctuate(200.0)
    assert not task.of(BATCHES)
    assert cuts(task)[0].excluded == {"ungraded:deadline": 6}
    assert progress_of(task.state).next_step == 0
    assert not task.punctuate(201.0)


@pytest.mark.parametrize("purpose", [Purpose.EVAL, Purpose.COLLECT])
def test_other_purposes_are_never_batched(purpose: Purpose) -> None:
    task = task_of()
    feed(task, *pair("g", purpose=purpose))
    assert excluded(task) == {purpose.value: ["g-a", "g-b"]}
    assert not task.state.get("group:g")


def test_another_policy_is_refused() -> None:
    task = task_of()
    feed(task, *pair("g", policy="other"))
    assert excluded(task) == {"other_policy": ["g-a", "g-b"]}


def test_b080_a_new_run_takes_nothing_of_the_run_that_used_its_prefix() -> None:
    task, other = task_of(), task_of(run="another")
    feed(task, *pair("g0"), *pair("g1"))
    task.punctuate(200.0)
    other.state, other.positions = task.restored(), dict(task.positions)
    refused = r"run 'run' up to step 1, and ROLLMILL_RUN is 'another'"
    with pytest.raises(ConfigurationError, match=refused):
        other.punctuate(201.0)
    with pytest.raises(ConfigurationError, match=refused):
        acknowledge(other, 0)
    assert not other.emitted


def test_words_for_other_runs_and_policies_are_not_heard() -> None:
    task = task_of()
    announce(task, 5, policy="other")
    announce(task, 5, run="another")
    task.feed(ACKS, EndOfStream(run="another", at=1.0))
    assert progress_of(task.state).policy_version == PolicyVersion()
    assert not progress_of(task.state).end_of_stream
    assert task.counts == {"announcements_of_others": 2, "trainer_events_of_others": 1}


def test_a_word_about_a_step_that_was_never_cut_is_a_dead_letter() -> None:
    task = task_of()
    acknowledge(task, 0)
    task.feed(ACKS, Rewound(run="run", next_step=1, at=1.0))
    assert [error.reason for _, error in task.dead_letters] == ["unknown_step", "unknown_step"]


def test_f11_an_announcement_that_skips_epochs_is_ignored() -> None:
    task = task_of()
    announce(task, 3)
    announce(task, 4, epoch=1_700_000_000, resumed_from=3)
    announce(task, 4, epoch=1, resumed_from=3)
    assert task.counts["announcements_that_skip_epochs"] == 1
    feed(task, *pair("g"))
    task.punctuate(200.0)
    assert batches(task)[0].header.policy_version == PolicyVersion(1, 4)


def test_forks_of_later_epochs_are_kept() -> None:
    task = task_of()
    announce(task, 14)
    announce(task, 11, epoch=1, resumed_from=10)
    feed(task, *pair("g", version=PolicyVersion(0, 12)))
    task.punctuate(200.0)
    header = batches(task)[0].header
    assert (header.policy_version, header.forks) == (PolicyVersion(1, 11), {1: 10})
    assert header.staleness_histogram == {(11 - 10) + (12 - 10): 6}


def test_the_end_of_the_stream_takes_what_is_there() -> None:
    task = task_of(groups_per_step=4)
    feed(task, *pair("full"), *pair("part", size=3), sample_trajectory("lone", group="few", size=3))
    task.feed(ACKS, EndOfStream(run="run", at=1.0))
    assert not task.punctuate(110.0, caught_up=False)
    task.punctuate(110.0)
    assert cuts(task)[0].groups == ("full", "part")
    assert cuts(task)[0].flush
    assert excluded(task) == {"group_expired": ["lone"]}


def test_a_flush_interval_takes_fewer_groups() -> None:
    task = task_of(groups_per_step=4, flush_seconds=30.0)
    feed(task, *pair("g"), sample_trajectory("lone", group="open"))
    assert not task.punctuate(129.0)
    task.punctuate(130.0)
    assert cuts(task)[0].groups == ("g",)
    assert "group:open" in task.state


def test_a_flush_interval_takes_a_group_that_its_deadline_has_made_ready() -> None:
    """A member that never ends keeps no other waiting, also where no group is full."""
    task = task_of(groups_per_step=2, flush_seconds=30.0, groups=GroupRules(deadline_seconds=60.0))
    for n in range(2):
        task.feed(TRAJECTORIES, sample_trajectory(f"s{n}", float(n), size=3))
    task.punctuate(159.0)
    task.punctuate(189.0)
    assert cuts(task) == []
    task.punctuate(190.0)
    assert [cut.groups for cut in cuts(task)] == [("g",)]


def test_too_large_a_trace_is_excluded_and_counts() -> None:
    task = task_of()
    long = sample_trace("g-a", (Reply(tuple(range(100))),))
    feed(task, sample_trajectory("g-a", 1.0, group="g", traces=[long]), *pair("g")[1:])
    task.punctuate(200.0)
    assert excluded(task) == {"too_large": ["g-a"]}
    assert batches(task)[0].advantages.tolist() == [-0.5]


def test_a_step_takes_fewer_groups_where_its_table_would_not_fit() -> None:
    task = task_of(groups_per_step=3, header_bytes=3000)
    for name in ("g0", "g1", "g2"):
        feed(task, *pair(name))
    task.punctuate(200.0)
    assert cuts(task)[0].groups == ("g0", "g1")


def test_all_ranks_get_the_same_number_of_micro_batches_in_one_step() -> None:
    task = task_of(world_size=2, micro_batch=Size(5, 4096), groups_per_step=1)
    feed(task, *pair("g", size=3), sample_trajectory("g-c", group="g", size=3))
    task.punctuate(200.0)
    found = batches(task)
    assert [(b.header.rank, b.header.micro_batch) for b in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [emit.partition for emit in task.of(BATCHES)] == [0, 0, 1, 1]
    assert [b.header.filler for b in found].count(True) == 1
    assert (
        len(
            {
                b.header.model_copy(update={"rank": 0, "micro_batch": 0, "filler": False}).model_dump_json()
                for b in found
            }
        )
        == 1
    )
    assert sorted(row for b in found for row in b.trace_index.tolist()) == [-1, 0, 1, 2]
    assert found[0].header.packing_efficiency == 1.0


def test_old_markers_are_forgotten_at_a_later_cut() -> None:
    task = task_of()
    feed(task, *pair("g0"))
    task.punctuate(200.0)
    acknowledge(task, 0)
    feed(task, *pair("g1", closed_at=900.0))
    task.punctuate(900.0)
    assert find_marker(task.state, "g0") is None
    assert find_marker(task.state, "g1") is not None
    assert same_state(task)


def test_the_same_topics_and_cuts_give_the_same_bytes() -> None:
    first, second = task_of(world_size=2, groups_per_step=2), task_of(world_size=2, groups_per_step=2)
    members = [member for name in ("g0", "g1", "g2") for member in pair(name)]
    feed(first, *members)
    feed(second, *reversed(members))
    for task in (first, second):
        announce(task, 1)
        task.punctuate(200.0)
    assert [emit.value for emit in first.of(BATCHES)] == [emit.value for emit in second.of(BATCHES)]


# B079: what was finished before the restart is cut from the state
def test_a_restored_batcher_cuts_what_the_old_one_would_have() -> None:
    task = task_of()
    announce(task, 1)
    feed(task, *pair("g0"), *pair("g1"), sample_trajectory("g1-a", 0.2, group="g1", revision=1))
    successor = task_of()
    successor.state, successor.positions = task.restored(), dict(task.positions)
    assert task.punctuate(200.0).records == successor.punctuate(200.0).records


def test_deltas_say_what_is_pending() -> None:
    task = task_of()
    (member, _) = pair("g")
    (delta,) = task.feed(TRAJECTORIES, member).updates
    assert delta.manifest == member.manifest


def test_a_trajectory_in_json_is_as_good() -> None:
    task = task_of()
    for member in pair("g"):
        task.feed(TRAJECTORIES, encode(member, JSON))
    task.punctuate(200.0)
    assert len(batches(task)) == 1
