"""The trainer's consumer of ``trajectories``, and the outcomes it writes. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import orjson
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from rollmill.codec import decode
from rollmill.errors import ConfigurationError, FatalError, PoisonRecordError
from rollmill.models import TokenDisposition, Trajectory
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.runtime.kafka.connection_diagnostics import diagnose_refusal
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.dead_letters import dead_letter
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.producer_records import producer_record
from rollmill.settings import KafkaSettings
from rollmill.topics import OUTCOMES, STATE_BATCHER, TRAJECTORIES
from rollmill.trainer.committed_offsets import list_committed
from rollmill.trainer.producer_records import STAGE, to_producer_record
from rollmill.trainer.trajectories.offset_watermark import OffsetWatermark
from rollmill.trainer.transactional_writer import TransactionalWriter

POLL_MS = 200
RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)


class RecordPosition(NamedTuple):
    """Partition and offset of a record."""

    partition: int
    offset: int


@dataclass(frozen=True)
class ReceivedTrajectory:
    """One decoded record and its position in the log."""

    at: RecordPosition
    trajectory: Trajectory


class TrajectoryConsumer:
    """Reads some partitions. ``writer``: commits outcomes and positions; None: nothing is ever written."""

    def __init__(self, settings: KafkaSettings, partitions: Sequence[int], writer: TransactionalWriter | None) -> None:
        self._settings = settings
        self._clients = KafkaClients(settings)
        self._claims = ClaimCheck.of(settings)
        self._topic = TRAJECTORIES.full_name(settings.prefix)
        self._writer = writer
        self._consumer: AIOKafkaConsumer | None = None
        self._records: AsyncIterator[ReceivedTrajectory] | None = None
        self._pending: asyncio.Task[ReceivedTrajectory] | None = None
        self._stop = asyncio.Event()
        self._finishing = asyncio.Lock()
        """Watermarks are read, written to Kafka, and replaced: two at once would lose one's records."""
        self.watermarks = {number: OffsetWatermark() for number in partitions}
        self._open: dict[int, set[int]] = {number: set() for number in partitions}
        self._position = dict.fromkeys(partitions, 0)

    @property
    def is_open(self) -> bool:
        return self._consumer is not None

    async def open(self, watermarks: Mapping[int, OffsetWatermark] | None = None) -> None:
        """Take over and read from ``watermarks``, else from what is committed, else from the beginning.

        Raises ConfigurationError where a batcher takes this prefix's trajectories, FatalError without a broker.
        """
        try:
            if self._writer is not None and not self.is_open:
                await self._refuse_batcher()
                await self._writer.start()
                self.watermarks |= await self._committed(self._writer.transactional_id)
            self.watermarks |= {
                number: self.watermarks[number].back_to(watermark) for number, watermark in (watermarks or {}).items()
            }
            await self._restart_reading()
            if self._writer is not None:
                await self._commit_position(self._writer)
        except KafkaError as error:
            await diagnose_refusal(self._settings)
            where = self._settings.bootstrap_servers
            raise FatalError(f"the stream cannot be opened at {where}: {type(error).__name__}: {error}") from error

    async def next(self, timeout_seconds: float | None) -> ReceivedTrajectory | None:
        """The next record; None once stopped. Raises TimeoutError."""
        if self._pending is None:
            if self._records is None:
                raise FatalError("the stream is closed")
            self._pending = asyncio.ensure_future(anext(self._records))
        stopped = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait(
            (self._pending, stopped), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        if self._stop.is_set():
            return None
        if self._pending not in done:
            raise TimeoutError
        found, self._pending = self._pending.result(), None
        return found

    def may_be_finished(self, received: ReceivedTrajectory) -> bool:
        """Whether outcomes of the record may have been written before a checkpoint was loaded."""
        return received.at.offset < self.watermarks[received.at.partition].reached

    async def finish(self, records: Iterable[RecordPosition], outcomes: Iterable[TokenDisposition]) -> None:
        """Write outcomes and positions, in one transaction."""
        written = [to_producer_record(OUTCOMES, item.session_id, item, self._settings) for item in outcomes]
        async with self._finishing:
            await self._finish(records, written)

    async def _finish(self, records: Iterable[RecordPosition], written: Sequence[ProducerRecord]) -> None:
        by_partition: dict[int, list[int]] = {}
        for partition, offset in records:
            by_partition.setdefault(partition, []).append(offset)
        after = {
            number: self.watermarks[number].finishing(offsets, self._open[number], self._position[number])
            for number, offsets in by_partition.items()
        }
        if self._writer is not None:
            commits = {
                TopicPartition(self._topic, number): (watermark.next_offset, watermark.metadata())
                for number, watermark in after.items()
            }
            await self._writer.write(written, commits)
        self.watermarks |= after
        for number, offsets in by_partition.items():
            self._open[number].difference_update(offsets)

    def stop(self) -> None:
        self._stop.set()

    async def close(self) -> None:
        self._stop.set()
        await self._stop_reading()
        if self._writer is not None:
            await self._writer.close()

    async def _refuse_batcher(self) -> None:
        """A batcher's changelog is never empty once it has run."""
        changelog = TopicPartition(STATE_BATCHER.full_name(self._settings.prefix), 0)
        async with self._clients.reading() as consumer:
            ends = await consumer.end_offsets([changelog])
        if ends[changelog]:
            raise ConfigurationError(
                f"a batcher takes the trajectories of prefix {self._settings.prefix!r}: one consumer of record is "
                "allowed; read along with record=False, or use a prefix without a batcher"
            )

    async def _commit_position(self, writer: TransactionalWriter) -> None:
        """Commit the position as it is: a batcher that starts later finds a consumer of record."""
        watermarks = {
            TopicPartition(self._topic, n): (watermark.next_offset, watermark.metadata())
            for n, watermark in self.watermarks.items()
        }
        await writer.write([], watermarks)

    async def _committed(self, group_id: str) -> dict[int, OffsetWatermark]:
        found = await list_committed(self._clients, group_id, self._topic)
        return {
            number: OffsetWatermark(next_offset=offset, **orjson.loads(metadata or "{}"))
            for number, (offset, metadata) in found.items()
            if number in self.watermarks
        }

    async def _restart_reading(self) -> None:
        await self._stop_reading()
        self._consumer = self._clients.consumer(reset="earliest")
        await self._consumer.start()
        self._consumer.assign([TopicPartition(self._topic, number) for number in self.watermarks])
        for number, watermark in self.watermarks.items():
            self._consumer.seek(TopicPartition(self._topic, number), watermark.next_offset)
            self._open[number] = set()
            self._position[number] = watermark.next_offset
        self._records = self._read(self._consumer)

    async def _read(self, consumer: AIOKafkaConsumer) -> AsyncIterator[ReceivedTrajectory]:
        done = {(number, offset) for number, watermark in self.watermarks.items() for offset in watermark.done}
        while True:
            polled = await without_client_cancellation(consumer.getmany(timeout_ms=POLL_MS, max_records=100))
            for record in (record for records in polled.values() for record in records):
                self._position[record.partition] = record.offset + 1
                if (record.partition, record.offset) not in done:
                    self._open[record.partition].add(record.offset)
                    at = RecordPosition(record.partition, record.offset)
                    try:
                        content = await self._content(record.value)
                        found: Trajectory = decode(Trajectory, content, tuple(record.headers))
                    except PoisonRecordError as error:
                        await self._set_aside(record, error)
                    else:
                        yield ReceivedTrajectory(at, found)

    async def _set_aside(self, record: ConsumerRecord[bytes, bytes], error: PoisonRecordError) -> None:
        """A dead letter, as a stage makes it; a stream that is not of record passes over the record."""
        log.warning("%s/%d offset %d is set aside: %s", self._topic, record.partition, record.offset, error)
        received = InputRecord(
            TRAJECTORIES,
            record.partition,
            record.offset,
            record.key or b"",
            record.value,
            tuple(record.headers),
        )
        letter = dead_letter(received, STAGE, error)
        written = [producer_record(output, self._settings) for output in letter.records]
        async with self._finishing:
            await self._finish([RecordPosition(record.partition, record.offset)], written)

    async def _content(self, value: bytes | None) -> bytes | None:
        """The value, from object storage where it is kept there; an unreachable storage is asked until it answers."""
        while True:
            try:
                return await self._claims.resolve(value)
            except StorageUnreachableError as error:
                log.warning("a large value cannot be read, next try in %g s: %s", RETRY_SECONDS, error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _stop_reading(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait((pending,))
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)
