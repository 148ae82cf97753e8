"""First: the sessions that are taken, built with the plan's builder."""

from __future__ import annotations

from rollmill.ledger.log import KafkaRecord, Log
from rollmill.replaying.plan import Plan
from rollmill.replaying.selecting import Selection
from rollmill.replaying.services import settings_of, stage_of
from rollmill.replaying.writer import Driver, Writer
from rollmill.stream.stage import InputRecord
from rollmill.topics import COMPLETIONS, Topic

BUILDER = "builder"


async def build(log: Log, plan: Plan, writer: Writer) -> Selection:
    """Reads the live `completions` to their end and returns what was taken of them."""
    settings = settings_of(BUILDER, plan.into, plan.options)
    stage = stage_of(BUILDER, settings)
    drivers = {number: Driver(stage, number, settings, writer) for number in range(settings.partitions)}
    beginnings = await log.beginnings(COMPLETIONS)
    selection = Selection(plan, frozenset(number for number, offset in beginnings.items() if offset))
    async for raw in log.read(COMPLETIONS):
        for record in selection.take(input_record(COMPLETIONS, raw)):
            await drivers[record.partition].feed(record)
    for driver in drivers.values():
        await driver.flush()
    return selection


def input_record(topic: Topic, raw: KafkaRecord) -> InputRecord:
    return InputRecord(topic, raw.partition, raw.offset, raw.key or b"", raw.value, tuple(raw.headers))
