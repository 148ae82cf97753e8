"""The batcher's inputs, merged in the order of event time."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rollmill.models import Trajectory
from rollmill.runtime.stream.processor import InputRecord


class InputKind(IntEnum):
    """Kinds of inputs; with equal times the lower value comes first."""

    ANNOUNCEMENT = 0
    STEP_FINISHED = 1
    """The trainer of the live run finished a step at that time."""
    TRAJECTORY = 2
    END = 3
    """The live run's trainer announced that no more trajectories come."""


@dataclass(frozen=True)
class TimedInput:
    """One input at its event time. ``record`` is None where only the time counts."""

    at: float
    kind: InputKind
    partition: int = 0
    offset: int = 0
    record: InputRecord | None = None

    @property
    def key(self) -> tuple[float, int, int, int]:
        return self.at, self.kind, self.partition, self.offset


async def merged(streams: Sequence[AsyncIterator[TimedInput]]) -> AsyncIterator[TimedInput]:
    """The inputs of all streams in one order; each stream has to be sorted."""
    heads: list[tuple[tuple[float, int, int, int], int, TimedInput]] = []
    for index, stream in enumerate(streams):
        await _push_next(heads, index, stream)
    while heads:
        _, index, timed = heapq.heappop(heads)
        yield timed
        await _push_next(heads, index, streams[index])


async def _push_next(
    heads: list[tuple[tuple[float, int, int, int], int, TimedInput]], index: int, stream: AsyncIterator[TimedInput]
) -> None:
    async for timed in stream:
        heapq.heappush(heads, (timed.key, index, timed))
        return


async def in_time_order(timed: Iterable[TimedInput]) -> AsyncIterator[TimedInput]:
    for item in sorted(timed, key=lambda item: item.key):
        yield item


async def slices(stream: AsyncIterator[TimedInput], seconds: float) -> AsyncIterator[list[TimedInput]]:
    """Runs of inputs of at most ``seconds`` of event time."""
    part: list[TimedInput] = []
    async for timed in stream:
        if part and timed.at - part[0].at >= seconds:
            yield part
            part = []
        part.append(timed)
    if part:
        yield part


def rewarded_at(trajectory: Trajectory) -> float:
    """When a trajectory could be batched: its session had ended and its last evaluation was written."""
    evaluations = (trajectory.evaluation or {}).get("evaluations") or ()
    return max([trajectory.closed_at, *(float(entry.get("at") or 0.0) for entry in evaluations)])
