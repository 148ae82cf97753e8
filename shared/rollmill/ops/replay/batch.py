"""Fourth step: cut steps from trajectories, announcements and the trainer's pace, in the order of event time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

from rollmill.models import EndOfStream, StepAcknowledged
from rollmill.ops.replay.input_records import readable, records
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.stages import settings_of, stage_of
from rollmill.ops.replay.timeline import InputKind, TimedInput, in_time_order, merged, rewarded_at, slices
from rollmill.ops.replay.trainer_stub import TrainerStub
from rollmill.ops.replay.writer import TaskDriver, Writer
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.processor import InputRecord
from rollmill.topics import ACKS, POLICIES, TRAJECTORIES

BATCHER = "batcher"


async def batch(live: Log, plan: Plan, writer: Writer) -> None:
    """Cut steps until the log is processed."""
    settings = settings_of(BATCHER, plan.into, plan.options)
    driver = TaskDriver(stage_of(BATCHER, settings), 0, settings, writer)
    announced, pace = await _announcements(live, writer), await _pace(live, writer)
    trainer = TrainerStub(driver, writer, sum(item.kind is InputKind.STEP_FINISHED for item in pace))
    async with AsyncExitStack() as stack:
        logs = [await stack.enter_async_context(Log.open(plan.into)) for _ in range(settings.partitions)]
        streams = [_trajectories(log, number) for number, log in enumerate(logs)]
        inputs = merged([in_time_order(announced), in_time_order(pace), *streams])
        async for part in slices(inputs, settings.timer_seconds):
            for timed in part:
                await _apply(driver, trainer, timed)
            await _settle(driver, trainer, part[-1].at)
    await driver.close()


async def _apply(driver: TaskDriver, trainer: TrainerStub, timed: TimedInput) -> None:
    if timed.kind is InputKind.STEP_FINISHED:
        await trainer.finish_next(timed.at)
    if timed.record is not None:
        await driver.feed(timed.record)


async def _settle(driver: TaskDriver, trainer: TrainerStub, now: float) -> None:
    """Cut as long as a cut has outputs."""
    while True:
        sent = await driver.punctuate(now)
        trainer.receive(sent)
        if not await trainer.finish_rest(now) and not sent:
            return


async def _trajectories(log: Log, partition: int) -> AsyncIterator[TimedInput]:
    """In the order of offsets; the times never decrease."""
    at = 0.0
    async for record in records(log, TRAJECTORIES, partition):
        at = max(at, rewarded_at(readable(record)))
        yield TimedInput(at, InputKind.TRAJECTORY, partition, record.offset, record)


async def _announcements(live: Log, writer: Writer) -> list[TimedInput]:
    """The recorded announcements, copied, in the order of offsets; the times never decrease."""
    found = [record async for record in records(live, POLICIES) if readable(record) is not None]
    offsets = await writer.write([_copy(record, writer) for record in found])
    inputs, at = [], 0.0
    for record, offset in zip(found, offsets, strict=True):
        at = max(at, readable(record).at)
        inputs.append(TimedInput(at, InputKind.ANNOUNCEMENT, 0, offset, replace(record, offset=offset)))
    return inputs


async def _pace(live: Log, writer: Writer) -> list[TimedInput]:
    """The times at which steps were finished, and the end of the stream where one is recorded; that is copied."""
    inputs: list[TimedInput] = []
    async for record in records(live, ACKS):
        event = readable(record)
        if isinstance(event, StepAcknowledged) and event.rank == 0:
            inputs.append(TimedInput(event.at, InputKind.STEP_FINISHED, 0, record.offset))
        if isinstance(event, EndOfStream):
            (offset,) = await writer.write([_copy(record, writer)])
            inputs.append(TimedInput(event.at, InputKind.END, 0, offset, replace(record, offset=offset)))
    return inputs


def _copy(record: InputRecord, writer: Writer) -> ProducerRecord:
    return writer.record(record.topic, 0, record.key, record.value or b"", record.headers)
