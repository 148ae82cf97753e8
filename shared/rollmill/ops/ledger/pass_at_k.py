"""pass@k of eval sessions, by data set and policy version (rule A7). Pure, apart from `read_evals`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import PolicyVersion, Purpose, Trajectory
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.topics import TRAJECTORIES


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that of k answers drawn without replacement from n, of which c are right, at least one is right.

    Unbiased for the chance that at least one of k fresh answers is: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right answers among {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


class EvalGroup(NamedTuple):
    """Data set, policy and version of a line of the report; None is unknown."""

    dataset: str | None
    policy: str
    version: PolicyVersion | None
    """The oldest version that sampled a token of the answer."""


@dataclass
class TaskAnswers:
    """Numbers of answers to one task."""

    graded: int = 0
    right: int = 0


@dataclass
class EvalLine:
    """One data set answered by one policy version."""

    of: EvalGroup
    tasks: dict[str, TaskAnswers] = field(default_factory=dict)
    ungraded: int = 0
    """Sessions without a grade; they are in no other number, because no grade is no failure."""
    mixed: int = 0
    """Graded sessions with tokens of several versions, because of a weight update."""
    rewards: list[float] = field(default_factory=list)

    @property
    def least(self) -> int:
        """Graded answers of the task that has the fewest; 0 where nothing is graded."""
        return min((task.graded for task in self.tasks.values()), default=0)

    def estimate(self, k: int) -> tuple[float | None, int]:
        """Mean of pass@k over the tasks with at least k graded answers, and their number."""
        values = [pass_at_k(task.graded, task.right, k) for task in self.tasks.values() if task.graded >= k]
        return (math.fsum(values) / len(values) if values else None), len(values)

    def as_json(self, ks: Sequence[int]) -> dict[str, Any]:
        estimates = {k: self.estimate(k) for k in ks}
        return {
            "dataset": self.of.dataset,
            "policy": self.of.policy,
            "version": None if self.of.version is None else str(self.of.version),
            "tasks": len(self.tasks),
            "graded": len(self.rewards),
            "ungraded": self.ungraded,
            "mixed_versions": self.mixed,
            "mean_reward": math.fsum(self.rewards) / len(self.rewards) if self.rewards else None,
            "pass_at": {str(k): {"value": value, "tasks": tasks} for k, (value, tasks) in estimates.items()},
        }


class EvalAnswer(NamedTuple):
    """What the report needs of an eval session."""

    of: EvalGroup
    task: str
    order: tuple[int, int]
    """Attempt and revision; the highest of a session counts."""
    reward: float | None
    mixed: bool


def answer_of(trajectory: Trajectory) -> EvalAnswer | None:
    """What the report needs of a trajectory; None for a session that is no eval."""
    if trajectory.spec.purpose is not Purpose.EVAL:
        return None
    versions = {version for trace in trajectory.traces for version, _ in trace.versions if version is not None}
    spec = trajectory.spec
    return EvalAnswer(
        EvalGroup(spec.dataset, spec.policy, min(versions, default=None)),
        spec.task_id or trajectory.group_id,
        (trajectory.attempt, trajectory.revision or 0),
        trajectory.outcome_reward,
        len(versions) > 1,
    )


async def read_evals(settings: KafkaSettings) -> dict[str, EvalAnswer]:
    """Every eval session that the topic still holds, by its id: the last attempt at its last revision."""
    found: dict[str, EvalAnswer] = {}
    async with Log.open(settings) as log:
        async for record in log.read(TRAJECTORIES):
            try:
                trajectory = decode(TRAJECTORIES.model, record.value, tuple(record.headers))
            except PoisonRecordError:
                continue  # the batcher writes it to the dead letters
            answer = answer_of(trajectory)
            known = found.get(trajectory.session_id)
            if answer is not None and (known is None or known.order < answer.order):
                found[trajectory.session_id] = answer
    return found


def report(answers: Mapping[str, EvalAnswer], right_from: float = 1.0) -> list[EvalLine]:
    """Lines by data set, policy and version. ``answers`` by session; right is a reward of at least ``right_from``."""
    lines: dict[EvalGroup, EvalLine] = {}
    for _, answer in sorted(answers.items()):
        _add(lines.setdefault(answer.of, EvalLine(answer.of)), answer, right_from)
    return sorted(lines.values(), key=lambda line: _sort_key(line.of))


def _add(line: EvalLine, answer: EvalAnswer, right_from: float) -> None:
    if answer.reward is None:
        line.ungraded += 1
        return
    task = line.tasks.setdefault(answer.task, TaskAnswers())
    task.graded += 1
    task.right += answer.reward >= right_from
    line.rewards.append(answer.reward)
    line.mixed += answer.mixed


def _sort_key(of: EvalGroup) -> tuple[str, str, PolicyVersion]:
    return (of.dataset or "", of.policy, of.version or PolicyVersion())


def default_ks(lines: Iterable[EvalLine]) -> list[int]:
    """1, and the number of answers that every task of every line has."""
    least = [line.least for line in lines if line.least]
    return sorted({1, min(least, default=1)})


def table(lines: Sequence[EvalLine], ks: Sequence[int]) -> Iterator[str]:
    """As text; a star where an estimate does not cover all tasks of the line."""
    heads = ("dataset", "policy", "version", "tasks", "graded", "ungraded", "reward", *(f"pass@{k}" for k in ks))
    yield _columns(heads)
    for line in lines:
        found = line.as_json(ks)
        counts = (str(found[name]) for name in ("tasks", "graded", "ungraded"))
        names = (found["dataset"] or "-", found["policy"], found["version"] or "-")
        estimates = (_estimate(*line.estimate(k), len(line.tasks)) for k in ks)
        yield _columns((*names, *counts, _number(found["mean_reward"]), *estimates))


def _estimate(value: float | None, tasks: int, of: int) -> str:
    return _number(value) + ("*" if tasks < of else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _columns(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:>11}" for cell in cells)
