"""Advantages of traces, from the rollout's reward or each trace's own; a rollout counts once (rules A1, A6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollmill.errors import ConfigurationError
from rollmill.strategies.foreign_code import contained, describe
from rollmill_batcher.groups.config import Credit, Learning
from rollmill_batcher.groups.eligibility import MemberVerdict
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.steps.advantages import Floats

Advantages = dict[tuple[str, int, int], float]
"""By (session, attempt, trace)."""


def trace_advantages(step: Sequence[EvaluatedGroup], learning: Learning) -> Advantages:
    """Of every trace that trains.

    With credit ``trace``, a trace has the advantage that its rollout would have had with the trace's reward. So the
    advantage of a rollout of one trace is the same with either credit, by any strategy.
    Raises ConfigurationError where a strategy raises, or returns another number of values, or one that is not finite.
    """
    scores = _Scores.of(step, learning)
    return {
        (verdict.member.session_id, verdict.member.attempt, trace.index): scores.of_trace(rollout, trace.trace.reward)
        for rollout, verdict in enumerate(_counted(step))
        for trace in verdict.trained
    }


@dataclass(frozen=True)
class _Scores:
    """Rewards of all rollouts of a step that count, group after group, and their advantages."""

    rewards: Floats
    """float64 [n]"""
    starts: tuple[int, ...]
    """Index of each group's first rollout, and n."""
    values: Floats
    """float64 [n]: the advantages."""
    learning: Learning

    @classmethod
    def of(cls, step: Sequence[EvaluatedGroup], learning: Learning) -> _Scores:
        rewards = np.array([reward for group in step for reward in group.rewards], dtype=np.float64)
        starts = tuple(np.cumsum([0, *(len(group.rewards) for group in step)]).tolist())
        return cls(rewards, starts, _values(rewards, starts, learning), learning)

    def of_trace(self, rollout: int, reward: float | None) -> float:
        own = self.learning.credit is Credit.TRACE and reward is not None and reward != self.rewards[rollout]
        if not own:
            return float(self.values[rollout])
        replaced = self.rewards.copy()
        replaced[rollout] = reward
        return float(_values(replaced, self.starts, self.learning)[rollout])


def _values(rewards: Floats, starts: Sequence[int], learning: Learning) -> Floats:
    try:
        with contained():
            parts = [learning.advantage.compute(rewards[a:b]) for a, b in pairwise(starts)]
            values = learning.advantage.over_step(np.concatenate(parts), rewards)
    except Exception as error:  # a third party's strategy can raise anything
        raise ConfigurationError(f"advantage strategy {learning.name!r} failed: {describe(error)}") from error
    if values.shape != rewards.shape or not np.isfinite(values).all():
        raise ConfigurationError(
            f"advantage strategy {learning.name!r} made {values.shape} values for {rewards.shape} rewards, "
            "or one that is not finite"
        )
    return values


def _counted(step: Sequence[EvaluatedGroup]) -> Iterator[MemberVerdict]:
    return (member for group in step for member in group.members if member.counts)
