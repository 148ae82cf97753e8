"""Third step: join trajectories and evaluations, in the order of event time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmill.models import Evaluation, Trajectory
from rollmill.ops.replay.input_records import readable, records
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.selection import SessionAttempt
from rollmill.ops.replay.stages import settings_of, stage_of
from rollmill.ops.replay.writer import TaskDriver, Writer
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.stream.processor import InputRecord
from rollmill.topics import BUILT, EVALUATIONS

MERGER = "reward-merger"
BUILT_PER_TIMER_RUN = 200


@dataclass
class PendingEvaluations:
    """Evaluations by session, and those of built sessions by time. Within a session they keep their order."""

    _by_session: dict[SessionAttempt, list[tuple[float, InputRecord]]] = field(default_factory=dict)
    _due: list[tuple[float, int, InputRecord]] = field(default_factory=list)

    def add(self, name: SessionAttempt, at: float, record: InputRecord) -> None:
        self._by_session.setdefault(name, []).append((at, record))

    def built(self, name: SessionAttempt, at: float) -> None:
        """The session is built: its earlier evaluations count from now, later ones from their own time."""
        for evaluated_at, record in self._by_session.pop(name, ()):
            at = max(at, evaluated_at)
            heapq.heappush(self._due, (at, record.offset, record))

    def until(self, at: float) -> Iterator[InputRecord]:
        """Those that are due at ``at``, in the order of time."""
        while self._due and self._due[0][0] <= at:
            yield heapq.heappop(self._due)[2]

    def orphans(self) -> list[InputRecord]:
        """Those of sessions that were not built."""
        return sorted(
            (record for waiting in self._by_session.values() for _, record in waiting), key=lambda record: record.offset
        )


async def merge(log: Log, plan: Plan, writer: Writer) -> None:
    """Merge every partition of the new prefix. Timers run only where the evaluations are new: else they are records."""
    settings = settings_of(MERGER, plan.into, plan.options)
    stage = stage_of(MERGER, settings)
    for number in range(settings.partitions):
        driver = TaskDriver(stage, number, settings, writer)
        await _merge(log, driver, run_timers=plan.evaluators is not None)


async def _merge(log: Log, driver: TaskDriver, *, run_timers: bool) -> None:
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
        if run_timers and fed % BUILT_PER_TIMER_RUN == 0:
            await _run_timers(driver, now)
    for record in [*waiting.until(float("inf")), *waiting.orphans()]:
        await driver.feed(record)
    if run_timers:
        await _run_timers(driver, now)
    await driver.close()


async def _run_timers(driver: TaskDriver, now: float) -> None:
    """Timers append records to `evaluations`; these are processed at once."""
    name = EVALUATIONS.full_name(driver.settings.prefix)
    for sent, offset in await driver.punctuate(now):
        if sent.topic == name:
            await driver.feed(InputRecord(EVALUATIONS, sent.partition, offset, sent.key, sent.value, sent.headers))


async def _evaluations(log: Log, partition: int) -> PendingEvaluations:
    waiting = PendingEvaluations()
    async for record in records(log, EVALUATIONS, partition):
        evaluation: Evaluation | None = readable(record)
        if evaluation is not None:
            waiting.add((evaluation.session_id, evaluation.attempt), evaluation.at, record)
    return waiting
