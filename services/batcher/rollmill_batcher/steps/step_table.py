"""The step's table: one row per trained trace, the same in every rank's header (rule A3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.models import GroupRow, Trace, TraceRow
from rollmill_batcher.groups.config import Size
from rollmill_batcher.groups.eligibility import MemberVerdict, TraceVerdict
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.groups.group_scoring import Scoring
from rollmill_batcher.groups.staleness import oldest_version
from rollmill_batcher.sizes import record_bytes
from rollmill_batcher.steps.loss_weights import TrainedTokens
from rollmill_batcher.steps.packing import Layout

ROW_BYTES = 384
UNIT_BYTES = 64
GROUP_BYTES = 256
REWARD_BYTES = 32
"""Bytes of a row, a unit, a group and one of its rewards as escaped JSON without their ids; upper bounds."""


@dataclass(frozen=True)
class TrainedTrace:
    """A trace of a step before it is packed. ``group`` and ``session`` are numbered over the step."""

    member: MemberVerdict
    verdict: TraceVerdict
    group: int
    session: int
    advantage: float
    decay: float = 1.0
    """Factor of the loss weight, by age."""

    @property
    def trace(self) -> Trace:
        return self.verdict.trace

    @property
    def tokens(self) -> int:
        return len(self.trace.prompt_ids) + len(self.trace.response_ids)

    @property
    def later_reward(self) -> float:
        """Reward that the rollout gets after the trace (rule A5): the sum of the token rewards of its later traces.

        Where no token of the rollout has a reward, the trace's own reward counts as given at its end.
        """
        traces = self.member.member.traces
        if all(trace.token_rewards is None for trace in traces):
            return self.trace.reward or 0.0
        after = [trace.token_rewards for trace in traces[self.verdict.index + 1 :] if trace.token_rewards is not None]
        return float(sum(rewards.sum(dtype=np.float64) for rewards in after))

    @property
    def size(self) -> Size:
        return Size(self.tokens, record_bytes(self.trace))

    @property
    def trained_tokens(self) -> TrainedTokens:
        rollout = self.member.member
        return TrainedTokens(rollout.group_id, (rollout.session_id, rollout.attempt), self.trace.trained_tokens)


def table_bytes(group: EvaluatedGroup) -> int:
    """Bytes of a group and of its rows in a record, an upper bound."""
    rows = sum(_row_bytes(member, trace) for member in group.members for trace in member.trained)
    reasons = sum(len(reason) + REWARD_BYTES for reason in group.failures)
    return GROUP_BYTES + len(group.group.group_id) + 2 * REWARD_BYTES * len(group.rewards) + reasons + rows


def _row_bytes(verdict: MemberVerdict, trace: TraceVerdict) -> int:
    ids = len(verdict.member.session_id) + len(verdict.member.group_id)
    return ROW_BYTES + ids + sum(UNIT_BYTES + len(unit.completion_id) for unit in trace.units)


def group_row(group: EvaluatedGroup, scoring: Scoring | None) -> GroupRow:
    counted = [own for own, member in zip(group.group.current, group.members, strict=True) if member.counts]
    return GroupRow(
        group_id=group.group.group_id,
        size=group.group.size,
        rewards=tuple(group.rewards),
        mean=float(np.mean(group.rewards)),
        deviation=float(np.std(group.rewards)),
        failures=group.failures,
        scorer=None if scoring is None else scoring.name,
        own_rewards=() if scoring is None else tuple(member.outcome_reward for member in counted),
    )


def build_table(traces: Sequence[TrainedTrace], weights: Sequence[float], layout: Layout) -> tuple[TraceRow, ...]:
    """Rows in the order of ``traces``, with the rank and the micro-batch that ``layout`` gives each."""
    positions = {
        index: (rank, number)
        for rank, micro_batches in enumerate(layout)
        for number, members in enumerate(micro_batches)
        for index in members
    }
    return tuple(
        _row(trace, weight, *positions[index])
        for index, (trace, weight) in enumerate(zip(traces, weights, strict=True))
    )


def _row(trained: TrainedTrace, weight: float, rank: int, micro_batch: int) -> TraceRow:
    rollout = trained.member.member
    return TraceRow(
        session_id=rollout.session_id,
        attempt=rollout.attempt,
        trace=trained.verdict.index,
        group_id=rollout.group_id,
        rank=rank,
        micro_batch=micro_batch,
        tokens=trained.tokens,
        mask_sum=trained.trace.trained_tokens,
        oldest=oldest_version(trained.trace),
        loss_weight=weight,
        reward=trained.member.reward,
        units=trained.verdict.units,
    )
