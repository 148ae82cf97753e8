"""Which waiting groups a cut evaluates: a bounded number, and every group in the end."""

from collections.abc import Sequence

from rollmill.models import PolicyVersion, StepAcknowledged, Trajectory
from rollmill.strategies import BaseGroupScorer
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import ACKS, BATCHES, TRAJECTORIES
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning, StepOrder
from rollmill_batcher.groups.group import RolloutGroup
from rollmill_batcher.groups.group_scoring import Scoring
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo
from rollmill_batcher.steps.group_selection import CLEANUP_GROUPS, cleanup_window

WAITING = 2 * CLEANUP_GROUPS + 40


class Counting(BaseGroupScorer):
    """Counts its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, members: Sequence[Trajectory]) -> list[float | None]:
        self.asked.append(members[0].group_id)
        return [1.0 for _ in members]


def task_of(scorer: Counting, count: int, groups_per_step: int) -> MemoryTask[StateValue]:
    """Groups of two rollouts of one token each."""
    config = BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("dr_grpo", DrGrpo()),
        groups=GroupRules(min_k=2),
        groups_per_step=groups_per_step,
        order=StepOrder.FRESHEST,
        scoring=Scoring("counting", scorer),
    )
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(config))
    for number in range(count):
        name = f"g{number:04d}"
        for member in range(2):
            trace = sample_trace(f"{name}-{member}", (Reply((5,), PolicyVersion(0, 0)),))
            task.feed(TRAJECTORIES, sample_trajectory(f"{name}-{member}", None, group=name, traces=[trace]))
    return task


def test_a_full_step_looks_at_no_more_than_its_groups_and_a_share_of_the_rest() -> None:
    scorer = Counting()
    task = task_of(scorer, WAITING, 2)
    task.punctuate(200.0)
    assert len(task.of(BATCHES)) == 1
    assert len(scorer.asked) == 2 + CLEANUP_GROUPS


def test_what_was_found_out_is_not_asked_again() -> None:
    scorer = Counting()
    task = task_of(scorer, 20, 30)
    for now in (200.0, 201.0, 202.0):
        task.punctuate(now)
    assert task.of(BATCHES) == []
    assert len(scorer.asked) == 20


def test_a_group_that_gets_another_member_is_looked_at_anew() -> None:
    scorer = Counting()
    task = task_of(scorer, 1, 2)
    task.punctuate(200.0)
    revised = sample_trajectory("g0000-0", None, group="g0000", revision=1)
    task.feed(TRAJECTORIES, revised)
    task.punctuate(201.0)
    assert scorer.asked == ["g0000", "g0000"]


def test_every_group_is_looked_after_in_its_turn() -> None:
    waiting = [RolloutGroup(f"g{number}") for number in range(WAITING)]
    rounds = [{group.group_id for group in cleanup_window(waiting, sequence)} for sequence in range(3)]
    assert {len(found) for found in rounds} == {CLEANUP_GROUPS}
    assert set().union(*rounds) == {group.group_id for group in waiting}
    assert cleanup_window(waiting[:CLEANUP_GROUPS], 7) == waiting[:CLEANUP_GROUPS]


def test_steps_go_on_while_thousands_wait() -> None:
    scorer = Counting()
    task = task_of(scorer, WAITING, 1)
    for step in range(3):
        task.punctuate(200.0 + step)
        task.feed(ACKS, StepAcknowledged(run="run", rank=0, world_size=1, step=step, batch_id="b", at=1.0))
    assert len(task.of(BATCHES)) == 3
    assert len(scorer.asked) <= 3 * (1 + CLEANUP_GROUPS)
