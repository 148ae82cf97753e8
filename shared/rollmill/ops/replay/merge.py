"""Third: trajectories and evaluations joined, in the order of event time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmill.models import Evaluation, Trajectory
from rollmill.ops.ledger.log_reader import Log
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.reading import readable, records
from rollmill.ops.replay.selection import Name
from rollmill.ops.replay.stages import settings_of, stage_of
from rollmill.ops.replay.writer import Driver, Writer
from rollmill.runtime.stream.processor import InputRecord
from rollmill.topics import BUILT, EVALUATIONS

MERGER = "reward-merger"
BUILT_PER_TICK = 200


@dataclass
class Waiting:
    """Evaluations by session, and those of built sessions by time. A session's own keep their order."""

    _of: dict[Name, list[tuple[float, InputRecord]]] = field(default_factory=dict)
    _due: list[tuple[float, int, InputRecord]] = field(default_factory=list)

    def add(self, name: Name, at: float, record: InputRecord) -> None:
        self._of.setdefault(name, []).append((at, record))

    def built(self, name: Name, at: float) -> None:
        """The session is there: what was said of it before counts from now, and what follows from its own time."""
        for said, record in self._of.pop(name, ()):
            at = max(at, said)
            heapq.heappush(self._due, (at, record.offset, record))

    def until(self, at: float) -> Iterator[InputRecord]:
        """Those whose time has come, in the order of time."""
        while self._due and self._due[0][0] <= at:
            yield heapq.heappop(self._due)[2]

    def orphans(self) -> list[InputRecord]:
        """Those of sessions that nothing was built of."""
        return sorted((record for said in self._of.values() for _, record in said), key=lambda record: record.offset)


async def merge(log: Log, plan: Plan, writer: Writer) -> None:
    """Every partition of the new prefix. Timers run only where the evaluations are new: else they are recorded."""
    settings = settings_of(MERGER, plan.into, plan.options)
    stage = stage_of(MERGER, settings)
    for number in range(settings.partitions):
        driver = Driver(stage, number, settings, writer)
        await _merge(log, driver, ticks=plan.evaluators is not None)


async def _merge(log: Log, driver: Driver, *, ticks: bool) -> None:
    waiting, now = await _evaluations(log, driver.number), 0.0
    fed = 0
    async for built in records(log, BUILT, driver.number):
        trajectory: Trajectory = readable(built)
        now = max(now, trajectory.closed_at)
        for record in waiting.until(now):
            await driver.feed(record)
        await driver.feed(built)
        waiting.built((trajectory.session_id, trajectory.attempt), now)
        fed += 1
        if ticks and fed % BUILT_PER_TICK == 0:
            await _tick(driver, now)
    for record in [*waiting.until(float("inf")), *waiting.orphans()]:
        await driver.feed(record)
    if ticks:
        await _tick(driver, now)
    await driver.close()


async def _tick(driver: Driver, now: float) -> None:
    """Timers append records to `evaluations`; they are read back at once."""
    name = EVALUATIONS.full_name(driver.settings.prefix)
    for sent, offset in await driver.punctuate(now):
        if sent.topic == name:
            await driver.feed(InputRecord(EVALUATIONS, sent.partition, offset, sent.key, sent.value, sent.headers))


async def _evaluations(log: Log, partition: int) -> Waiting:
    waiting = Waiting()
    async for record in records(log, EVALUATIONS, partition):
        evaluation: Evaluation | None = readable(record)
        if evaluation is not None:
            waiting.add((evaluation.session_id, evaluation.attempt), evaluation.at, record)
    return waiting
