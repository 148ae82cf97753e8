"""Fourth: trajectories, announcements and the trainer's pace made into steps, in the order of event time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

from rollmill.models import EndOfStream, StepAcknowledged
from rollmill.ops.ledger.log_reader import Log
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.reading import readable, records
from rollmill.ops.replay.stages import settings_of, stage_of
from rollmill.ops.replay.timeline import Kind, Taken, listed, merged, rewarded_at, slices
from rollmill.ops.replay.trainer_stub import Trainer
from rollmill.ops.replay.writer import Driver, Writer
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.processor import InputRecord
from rollmill.topics import ACKS, POLICIES, TRAJECTORIES

BATCHER = "batcher"


async def batch(live: Log, plan: Plan, writer: Writer) -> None:
    """Cuts steps until the log is through."""
    settings = settings_of(BATCHER, plan.into, plan.options)
    driver = Driver(stage_of(BATCHER, settings), 0, settings, writer)
    announced, paced = await _announcements(live, writer), await _pace(live, writer)
    trainer = Trainer(driver, writer, sum(item.kind is Kind.BEAT for item in paced))
    async with AsyncExitStack() as stack:
        logs = [await stack.enter_async_context(Log.open(plan.into)) for _ in range(settings.partitions)]
        streams = [_trajectories(log, number) for number, log in enumerate(logs)]
        inputs = merged([listed(announced), listed(paced), *streams])
        async for part in slices(inputs, settings.timer_seconds):
            for taken in part:
                await _take(driver, trainer, taken)
            await _settle(driver, trainer, part[-1].at)
    await driver.close()


async def _take(driver: Driver, trainer: Trainer, taken: Taken) -> None:
    if taken.kind is Kind.BEAT:
        await trainer.beat(taken.at)
    if taken.record is not None:
        await driver.feed(taken.record)


async def _settle(driver: Driver, trainer: Trainer, now: float) -> None:
    """Cut as long as a cut changes something."""
    while True:
        sent = await driver.punctuate(now)
        trainer.receive(sent)
        if not await trainer.finish_rest(now) and not sent:
            return


async def _trajectories(log: Log, partition: int) -> AsyncIterator[Taken]:
    """In the order of offsets; none is earlier than the one before it."""
    at = 0.0
    async for record in records(log, TRAJECTORIES, partition):
        at = max(at, rewarded_at(readable(record)))
        yield Taken(at, Kind.TRAJECTORY, partition, record.offset, record)


async def _announcements(live: Log, writer: Writer) -> list[Taken]:
    """The recorded ones, copied; each counts from its own time, or from that of an earlier one that was later."""
    found = [record async for record in records(live, POLICIES) if readable(record) is not None]
    offsets = await writer.write([_copy(record, writer) for record in found])
    taken, at = [], 0.0
    for record, offset in zip(found, offsets, strict=True):
        at = max(at, readable(record).at)
        taken.append(Taken(at, Kind.ANNOUNCEMENT, 0, offset, replace(record, offset=offset)))
    return taken


async def _pace(live: Log, writer: Writer) -> list[Taken]:
    """When steps were finished, and the end of the stream where one was told; that is copied."""
    taken: list[Taken] = []
    async for record in records(live, ACKS):
        event = readable(record)
        if isinstance(event, StepAcknowledged) and event.rank == 0:
            taken.append(Taken(event.at, Kind.BEAT, 0, record.offset))
        if isinstance(event, EndOfStream):
            (offset,) = await writer.write([_copy(record, writer)])
            taken.append(Taken(event.at, Kind.END, 0, offset, replace(record, offset=offset)))
    return taken


def _copy(record: InputRecord, writer: Writer) -> ProducerRecord:
    return writer.record(record.topic, 0, record.key, record.value or b"", record.headers)
