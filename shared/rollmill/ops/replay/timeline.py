"""The batcher's inputs in one order of event time."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rollmill.models import Trajectory
from rollmill.runtime.stream.processor import InputRecord


class Kind(IntEnum):
    """In the order that equal times are taken in."""

    ANNOUNCEMENT = 0
    BEAT = 1
    """The trainer of the live run finished a step then."""
    TRAJECTORY = 2
    END = 3
    """The live run was told that no more trajectories come."""


@dataclass(frozen=True)
class Taken:
    """One input at its event time. ``record`` is None for what is only a time."""

    at: float
    kind: Kind
    partition: int = 0
    offset: int = 0
    record: InputRecord | None = None

    @property
    def key(self) -> tuple[float, int, int, int]:
        return self.at, self.kind, self.partition, self.offset


async def merged(streams: Sequence[AsyncIterator[Taken]]) -> AsyncIterator[Taken]:
    """All of the streams, each of which is sorted, in one order."""
    heads: list[tuple[tuple[float, int, int, int], int, Taken]] = []
    for index, stream in enumerate(streams):
        await _next(heads, index, stream)
    while heads:
        _, index, taken = heapq.heappop(heads)
        yield taken
        await _next(heads, index, streams[index])


async def _next(
    heads: list[tuple[tuple[float, int, int, int], int, Taken]], index: int, stream: AsyncIterator[Taken]
) -> None:
    async for taken in stream:
        heapq.heappush(heads, (taken.key, index, taken))
        return


async def listed(taken: Iterable[Taken]) -> AsyncIterator[Taken]:
    for item in sorted(taken, key=lambda item: item.key):
        yield item


async def slices(stream: AsyncIterator[Taken], seconds: float) -> AsyncIterator[list[Taken]]:
    """Runs of inputs of at most ``seconds`` of event time."""
    part: list[Taken] = []
    async for taken in stream:
        if part and taken.at - part[0].at >= seconds:
            yield part
            part = []
        part.append(taken)
    if part:
        yield part


def rewarded_at(trajectory: Trajectory) -> float:
    """When a trajectory was there to be batched: its session had ended and its last grade was given."""
    said = (trajectory.evaluation or {}).get("evaluations") or ()
    return max([trajectory.closed_at, *(float(entry.get("at") or 0.0) for entry in said)])
