"""First step: build the selected sessions with the plan's builder."""

from __future__ import annotations

from rollmill.ops.replay.input_records import records
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.selection import Selection
from rollmill.ops.replay.stages import settings_of, stage_of
from rollmill.ops.replay.writer import TaskDriver, Writer
from rollmill.runtime.kafka.log_reader import Log
from rollmill.topics import COMPLETIONS

BUILDER = "builder"


async def build(log: Log, plan: Plan, writer: Writer) -> Selection:
    """Reads the live `completions` to their end and returns what was taken of them."""
    settings = settings_of(BUILDER, plan.into, plan.options)
    stage = stage_of(BUILDER, settings)
    drivers = {number: TaskDriver(stage, number, settings, writer) for number in range(settings.partitions)}
    beginnings = await log.beginnings(COMPLETIONS)
    selection = Selection(plan, frozenset(number for number, offset in beginnings.items() if offset))
    async for received in records(log, COMPLETIONS):
        for record in selection.take(received):
            await drivers[record.partition].feed(record)
    for driver in drivers.values():
        await driver.close()
    return selection
