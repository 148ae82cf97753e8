"""Fourth: trajectories, announcements and the trainer's pace made into steps, in the order of event time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.ledger.log import KafkaRecord, Log
from rollmill.models import EndOfStream, PolicyAnnouncement, StepAcknowledged, Trajectory
from rollmill.replaying.building import input_record
from rollmill.replaying.plan import Plan
from rollmill.replaying.services import settings_of, stage_of
from rollmill.replaying.timeline import Kind, Taken, listed, merged, rewarded_at, slices
from rollmill.replaying.training import Trainer
from rollmill.replaying.writer import Driver, Writer
from rollmill.stream.stage import InputRecord
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
    await driver.flush()


async def _take(driver: Driver, trainer: Trainer, taken: Taken) -> None:
    if taken.kind is Kind.BEAT:
        await trainer.beat(taken.at)
    if taken.record is not None:
        await driver.feed(taken.record)


async def _settle(driver: Driver, trainer: Trainer, now: float) -> None:
    """Cut as long as a cut changes something."""
    while True:
        sent = await driver.tick(now)
        trainer.receive(sent)
        if not await trainer.finish_rest(now) and not sent:
            return


async def _trajectories(log: Log, partition: int) -> AsyncIterator[Taken]:
    """In the order of offsets; none is earlier than the one before it."""
    at = 0.0
    async for raw in log.read(TRAJECTORIES, only=partition):
        trajectory: Trajectory = decode(Trajectory, raw.value, tuple(raw.headers))
        at = max(at, rewarded_at(trajectory))
        yield Taken(at, Kind.TRAJECTORY, partition, raw.offset, input_record(TRAJECTORIES, raw))


async def _announcements(live: Log, writer: Writer) -> list[Taken]:
    """The recorded ones, copied; each counts from its own time, or from that of an earlier one that was later."""
    found = [raw async for raw in live.read(POLICIES) if _read(PolicyAnnouncement, raw) is not None]
    records = [writer.record(POLICIES, 0, raw.key or b"", raw.value or b"", tuple(raw.headers)) for raw in found]
    taken, at = [], 0.0
    for raw, sent, offset in zip(found, records, await writer.write(records), strict=True):
        at = max(at, _read(PolicyAnnouncement, raw).at)
        record = InputRecord(POLICIES, 0, offset, sent.key, sent.value, sent.headers)
        taken.append(Taken(at, Kind.ANNOUNCEMENT, 0, offset, record))
    return taken


async def _pace(live: Log, writer: Writer) -> list[Taken]:
    """When steps were finished, and the end of the stream where one was told; that is copied."""
    taken: list[Taken] = []
    async for raw in live.read(ACKS):
        event = _read(ACKS.model, raw)
        if isinstance(event, StepAcknowledged) and event.rank == 0:
            taken.append(Taken(event.at, Kind.BEAT, 0, raw.offset))
        if isinstance(event, EndOfStream):
            sent = writer.record(ACKS, 0, raw.key or b"", raw.value or b"", tuple(raw.headers))
            (offset,) = await writer.write([sent])
            record = InputRecord(ACKS, 0, offset, sent.key, sent.value, sent.headers)
            taken.append(Taken(event.at, Kind.END, 0, offset, record))
    return taken


def _read(kind: Any, raw: KafkaRecord) -> Any:
    try:
        return decode(kind, raw.value, tuple(raw.headers))
    except PoisonRecordError:
        return None
