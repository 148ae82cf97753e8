"""pass@k of eval sessions: the estimator by value, and what counts as an answer (rule A7)."""

from itertools import combinations
from typing import Any

import pytest

from rollmill.models import PolicyVersion, Purpose, SessionSpec, Trajectory
from rollmill.ops.ledger.pass_at_k import answer_of, default_ks, pass_at_k, report, table
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.topics import BATCHES, OUTCOMES, TRAJECTORIES
from rollmill_batcher.groups.config import BatcherConfig, Learning
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo


def exam(name: str, reward: float | None, task: str = "t", *versions: int, **fields: Any) -> Trajectory:
    replies = [Reply(version=PolicyVersion(0, version)) for version in versions or (3,)]
    spec = SessionSpec(task_id=task, dataset="math", purpose=Purpose.EVAL, group_id=f"g-{task}", group_size=4)
    return sample_trajectory(name, reward, traces=[sample_trace(name, replies)], **fields).replace(spec=spec)


def lines_of(*trajectories: Trajectory) -> list[dict[str, Any]]:
    answers = {t.session_id: answer for t in trajectories if (answer := answer_of(t)) is not None}
    lines = report(answers)
    return [line.as_json(default_ks(lines)) for line in lines]


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 2), (4, 3, 2), (1, 1, 1)])
def test_the_estimator_is_the_share_of_draws_with_a_right_answer(n: int, c: int, k: int) -> None:
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_published_numbers() -> None:
    """Of 200 samples 10 right: 0.05 at 1, and at 10 what the paper's product formula gives."""
    product = 1.0
    for i in range(200 - 10 + 1, 200 + 1):
        product *= 1 - 10 / i
    assert pass_at_k(200, 10, 1) == pytest.approx(0.05)
    assert pass_at_k(200, 10, 10) == pytest.approx(1 - product)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_what_is_no_estimate_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="right answers among"):
        pass_at_k(n, c, k)


def test_a_task_counts_once_and_no_grade_is_no_failure() -> None:
    (line,) = lines_of(
        exam("a0", 1.0, "easy"),
        exam("a1", 1.0, "easy"),
        exam("a2", 0.5, "easy"),
        exam("b0", 0.0, "hard"),
        exam("b1", 1.0, "hard", 3, 4),
        exam("b2", None, "hard"),
        sample_trajectory("train"),
    )
    assert (line["dataset"], line["version"], line["tasks"], line["graded"]) == ("math", str(PolicyVersion(0, 3)), 2, 5)
    assert (line["ungraded"], line["mixed_versions"], line["mean_reward"]) == (1, 1, 0.7)
    assert line["pass_at"] == {
        "1": {"value": pytest.approx((2 / 3 + 1 / 2) / 2), "tasks": 2},
        "2": {"value": pytest.approx(1.0), "tasks": 2},
    }


def test_b063_pass_at_k_counts_rollouts_and_not_their_traces() -> None:
    """Four rollouts with 3, 1, 1 and 2 traces, one of them right."""
    answers = []
    for name, reward, count in (("a", 1.0, 3), ("b", 0.0, 1), ("c", 0.0, 1), ("d", 0.0, 2)):
        one = exam(name, reward)
        answers.append(one.replace(traces=one.traces * count))
    (line,) = lines_of(*answers)
    assert line["pass_at"] == {"1": {"value": 0.25, "tasks": 1}, "4": {"value": 1.0, "tasks": 1}}


def test_versions_are_lines_of_their_own_and_a_person_can_read_them() -> None:
    answers = [answer_of(each) for each in (exam("a", 1.0, "t", 2), exam("b", 0.0, "t", 3), exam("c", 0.0, "u", 3))]
    lines = report({str(n): answer for n, answer in enumerate(answers) if answer is not None})
    head, older, newer = table(lines, [1, 2])
    assert head.split() == ["dataset", "policy", "version", "tasks", "graded", "ungraded", "reward", "pass@1", "pass@2"]
    assert older.split()[-2:] == ["1.0000", "-*"]
    assert newer.split()[-2:] == ["0.0000", "-*"]


def test_the_batcher_counts_evals_and_batches_none() -> None:
    rules = BatcherConfig(run="run", policy="policy", learning=Learning("dr_grpo", DrGrpo()), groups_per_step=1)
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(rules))
    for member in (exam("a", 1.0), exam("b", 0.0), exam("c", None)):
        task.feed(TRAJECTORIES, member)
    task.punctuate(1e6)
    assert task.of(BATCHES) == []
    assert {getattr(emit.value, "reason", None) for emit in task.of(OUTCOMES)} == {"eval"}
    assert (task.counts["evals_graded"], task.counts["evals_ungraded"]) == (2, 1)
