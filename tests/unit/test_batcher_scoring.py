"""Group scorers: rollouts graded against each other at the cut, deterministic, with provenance (rule A6)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import RefillRequest, Trajectory
from rollmill.strategies import BaseGroupScorer, BasePairwiseScorer
from rollmill.strategies.allow_list import SETTING
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import sample_trace, sample_trajectory
from rollmill.topics import BATCHES, REFILLS, TRAJECTORIES
from rollmill.trainer.layouts.safetensors_reader import PackedBatch, read_batch
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning
from rollmill_batcher.groups.group_scoring import Scoring
from rollmill_batcher.groups.majority import Majority
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import StateValue
from rollmill_batcher.steps.advantages import DrGrpo

BATCHER_CONFIG = BatcherConfig(
    run="run",
    policy="policy",
    learning=Learning("dr_grpo", DrGrpo()),
    groups=GroupRules(min_k=2, deadline_seconds=60.0),
    groups_per_step=1,
    scoring=Scoring("majority", Majority()),
)


class Longest(BasePairwiseScorer):
    """The longer output wins."""

    def compare(self, one: Trajectory, other: Trajectory) -> float:
        mine, theirs = len(one.output or b""), len(other.output or b"")
        return 0.5 if mine == theirs else float(mine > theirs)


class Broken(BaseGroupScorer):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def score(self, members: Sequence[Trajectory]) -> Sequence[float | None]:
        if self._kind == "raises":
            raise KeyError("answer")
        return [float("nan")] * len(members) if self._kind == "nan" else [1.0]


def answered(name: str, answer: Any, *, size: int = 4, reward: float | None = None, group: str = "g") -> Trajectory:
    output = None if answer is None else json.dumps({"answer": answer}).encode()
    return sample_trajectory(name, reward, size=size, output=output, ungraded_reason="no_evaluator", group=group)


def ticked(members: Sequence[Trajectory], now: float = 120.0, **changes: Any) -> MemoryTask[StateValue]:
    task: MemoryTask[StateValue] = MemoryTask(BatcherStage(replace(BATCHER_CONFIG, **changes)))
    for member in members:
        task.feed(TRAJECTORIES, member)
    task.punctuate(now)
    return task


def batch_of(task: MemoryTask[StateValue]) -> PackedBatch:
    (emit,) = task.of(BATCHES)
    assert isinstance(emit.value, bytes)
    return read_batch(emit.value)


def rewards(batch: PackedBatch) -> dict[str, float]:
    return {
        batch.header.table[row].session_id: value
        for row, value in zip(batch.trace_index, batch.rewards.tolist(), strict=True)
    }


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a", "b", "a ", "c"], [1.0, 0.0, 1.0, 0.0]),
        (["a", "b", "a", "b"], [None] * 4),
        ([None, "b", None, None], [None, 1.0, None, None]),
        ([{"y": 1, "x": 2}, {"x": 2, "y": 1}, 7], [1.0, 1.0, 0.0]),
        ([3, "3", 3], [1.0, 0.0, 1.0]),
        ([None, None], [None, None]),
    ],
    ids=["most", "tie", "no answer", "objects", "types", "nothing"],
)
def test_the_majority(answers: list[Any], expected: list[float | None]) -> None:
    assert Majority("answer").score([answered(str(n), answer) for n, answer in enumerate(answers)]) == expected


def test_without_a_field_the_whole_output_is_the_answer() -> None:
    members = [answered(str(n), each) for n, each in enumerate([{"b": 1, "a": 2}, {"a": 2, "b": 1}, "a"])]
    assert Majority().score(members) == [1.0, 1.0, 0.0]
    assert Majority("other").score(members) == [None, None, None]


def test_a_pair_is_compared_in_both_directions() -> None:
    assert Longest().score([answered("a", "x"), answered("b", "xxx"), answered("c", "x")]) == [0.25, 1.0, 0.25]
    assert Longest().score([answered("a", "x")]) == [None]


def test_a_group_without_evaluators_trains_by_its_scorer() -> None:
    """Whatever order its members come in."""
    members = [answered(f"s{n}", answer, reward=0.5 if n == 1 else None) for n, answer in enumerate("abaa")]
    batch = batch_of(ticked(members))
    assert rewards(batch) == {"s0": 1.0, "s1": 0.0, "s2": 1.0, "s3": 1.0}
    assert sorted(batch.advantages.tolist()) == [-0.75, 0.25, 0.25, 0.25]
    (group,) = batch.header.groups
    assert (group.scorer, group.rewards, group.own_rewards) == (
        "majority",
        (1.0, 0.0, 1.0, 1.0),
        (None, 0.5, None, None),
    )
    assert [emit.value for emit in ticked(members[::-1]).of(BATCHES)] == [
        emit.value for emit in ticked(members).of(BATCHES)
    ]


def test_a_scorers_reward_stands_in_place_of_what_evaluators_gave_inside() -> None:
    """Rewards of turns and tokens are the evaluators', the outcome at the last token included: returns are not."""
    given = np.array([0.0, 0.25, 5.0], np.float32)
    members = [
        answered(f"s{n}", answer, size=3, reward=5.0).replace(
            traces=(sample_trace(f"s{n}", reward=5.0, token_rewards=given),)
        )
        for n, answer in enumerate("aba")
    ]
    batch = batch_of(ticked(members))
    assert batch.token_rewards is None
    assert batch.later_rewards.tolist() == batch.rewards.tolist()
    assert rewards(batch) == {"s0": 1.0, "s1": 0.0, "s2": 1.0}


def test_outputs_survive_a_restart_and_are_kept_for_scorers_alone() -> None:
    kept = ticked([answered("s0", "a")])
    assert dict(kept.restored().items()) == dict(kept.state.items())
    outputs = [
        next(value for _, value in task.state.items() if hasattr(value, "members")).members[0].output
        for task in (kept, ticked([answered("s0", "a")], scoring=None))
    ]
    assert outputs == [b'{"answer": "a"}', None]


def test_a_group_without_a_majority_is_asked_for_again() -> None:
    task = ticked([answered("s0", "a", size=2), answered("s1", "b", size=2)])
    assert task.of(BATCHES) == []
    (refill,) = [emit.value for emit in task.of(REFILLS)]
    assert isinstance(refill, RefillRequest)
    assert (refill.reason, refill.failures) == ("group_too_small", {"ungraded:group_scorer": 2})


def test_what_has_come_by_the_deadline_is_scored() -> None:
    members = [answered(f"s{n}", answer) for n, answer in enumerate("aab")]
    assert ticked(members).of(BATCHES) == []
    assert rewards(batch_of(ticked(members, now=161.0))) == {"s0": 1.0, "s1": 1.0, "s2": 0.0}


@pytest.mark.parametrize("kind", ["raises", "nan", "short"])
def test_f3_a_scorer_that_fails_at_a_group_grades_it_not_and_nothing_else_happens(kind: str) -> None:
    task = ticked([answered(f"s{n}", "a", size=2) for n in (0, 1)], scoring=Scoring("mine", Broken(kind)))
    assert task.of(BATCHES) == []
    (refill,) = [emit.value for emit in task.of(REFILLS)]
    assert isinstance(refill, RefillRequest)
    assert refill.failures == {"ungraded:group_scorer_failed": 2}


def test_f3_a_scorer_that_fails_at_every_group_stops_the_batcher() -> None:
    members = [answered(f"s{g}.{n}", "a", size=2, group=f"g{g}") for g in range(11) for n in (0, 1)]
    with pytest.raises(ConfigurationError, match="failed at 11 groups in a row"):
        ticked(members, scoring=Scoring("mine", Broken("raises")))


def test_a_scorer_is_set_by_name_or_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, __name__)
    named = BatcherSettings(group_scorer="majority", group_scorer_config={"field": "final"}).batcher_config().scoring
    own = BatcherSettings(group_scorer=f"{__name__}:Longest").batcher_config().scoring
    assert named is not None
    assert own is not None
    assert isinstance(named.scorer, Majority)
    assert own.name == f"{__name__}:Longest"
    for wrong in ({"group_scorer": "most"}, {"group_scorer": "majority", "group_scorer_config": {"k": 1}}):
        with pytest.raises((ConfigurationError, InvalidInputError)):
            BatcherSettings(**wrong).batcher_config()
