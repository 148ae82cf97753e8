"""The step's table: one row per trained trace, the same in every rank's header (RULES A3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.models import Trace, TraceRow, Trajectory, Unit
from rollmill_batcher.packing import Bin, Size
from rollmill_batcher.staleness import oldest_version
from rollmill_batcher.tensors import record_bytes
from rollmill_batcher.weights import Share

ROW_BYTES = 320
UNIT_BYTES = 64
"""Of a row and of a unit as escaped JSON, ids apart; upper bounds."""


@dataclass(frozen=True)
class TrainedTrace:
    """A trace of a step before its place is known."""

    member: Trajectory
    index: int
    trace: Trace
    advantage: float

    @property
    def tokens(self) -> int:
        return len(self.trace.prompt_ids) + len(self.trace.response_ids)

    @property
    def size(self) -> Size:
        return Size(self.tokens, record_bytes(self.trace))

    @property
    def share(self) -> Share:
        rollout = (self.member.session_id, self.member.attempt)
        return Share(self.member.group_id, rollout, self.trace.trained_tokens)


def row_bytes(member: Trajectory, units: Sequence[Unit]) -> int:
    """Bytes of one row in a record, an upper bound."""
    ids = len(member.session_id) + len(member.group_id) + sum(len(unit.completion_id) for unit in units)
    return ROW_BYTES + UNIT_BYTES * len(units) + ids


def table_of(
    traces: Sequence[TrainedTrace], weights: Sequence[float], plan: Sequence[Sequence[Bin]]
) -> tuple[TraceRow, ...]:
    """Rows in the order of ``traces``, with the place that ``plan`` gives each."""
    places = {
        index: (rank, number)
        for rank, micro_batches in enumerate(plan)
        for number, members in enumerate(micro_batches)
        for index in members
    }
    return tuple(
        _row(trace, weight, *places[index]) for index, (trace, weight) in enumerate(zip(traces, weights, strict=True))
    )


def _row(trained: TrainedTrace, weight: float, rank: int, micro_batch: int) -> TraceRow:
    return TraceRow(
        session_id=trained.member.session_id,
        attempt=trained.member.attempt,
        trace=trained.index,
        group_id=trained.member.group_id,
        rank=rank,
        micro_batch=micro_batch,
        tokens=trained.tokens,
        mask_sum=trained.trace.trained_tokens,
        oldest=oldest_version(trained.trace),
        loss_weight=weight,
        units=trained.trace.units(),
    )
