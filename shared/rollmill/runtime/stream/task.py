"""The loop of a task: poll, process, commit one transaction, again. A `Task` owns producer, consumer and state."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import structlog
from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from rollmill.codec import JSON, encode
from rollmill.errors import FatalError, FencedError
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.failpoints import Failpoint
from rollmill.runtime.kafka.transaction import (
    ProducerRecord,
    Transaction,
    TransactionFailedError,
    abandon,
    refuse_forbidden,
    stop_producer,
)
from rollmill.runtime.stream.batch_processor import YIELD_SECONDS, BatchProcessor, TransactionBatch
from rollmill.runtime.stream.changelog import OWNER, POSITION, ChangelogReader, ChangelogScan, Position
from rollmill.runtime.stream.dead_letters import DeadLetterLimitError
from rollmill.runtime.stream.processor import Processor, TaskContext
from rollmill.runtime.stream.task_consumer import TaskConsumer
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.runtime.stream.task_metrics import TaskMetrics
from rollmill.runtime.stream.task_stop import DECISION, NOTES, STOPPED, StopNotes, stop_note
from rollmill.runtime.stream.task_tools import TaskTools

V = TypeVar("V")

log = structlog.get_logger(__name__)

MAX_TRANSACTION = 32 * 2**20
"""Output bytes after which polled records are committed in parts."""
REFUSALS_BEFORE_ISOLATION = 2
MAX_BACKOFF = 15.0


class Task(Generic[V]):
    """Runs one task until it has to stop, is fenced, or meets an error that no retry can mend."""

    def __init__(self, stage: Processor[V, Any], identity: TaskIdentity, tools: TaskTools) -> None:
        self.stage, self.identity, self._tools = stage, identity, tools
        self.name = f"{identity.stage}.{identity.number}"
        self.processor: BatchProcessor[V] = BatchProcessor(stage, identity, tools.settings)
        self._owner, self._epoch = uuid.uuid4().hex, 0
        """Name of this process as an owner, and how often it has taken the task."""
        self._log = log.bind(task=self.name)
        self._producer: AIOKafkaProducer | None = None
        self._consumer: TaskConsumer | None = None
        self._committed: Position | None = None
        self._in_doubt: Position | None = None
        self._changelog = ChangelogReader(tools.clients, identity.changelog, tools.settings.deadline_seconds)
        self._changelog_next: int | None = None
        """Changelog offset from which on nothing is known; owner records of others behind it fence this process."""
        self._restored, self._notes = False, StopNotes()
        self._claim_check = ClaimCheck.of(tools.settings)
        self._next_punctuation = 0.0
        self._metrics = TaskMetrics(tools.metrics, self.name, tools.settings.prefix)
        self._failures = 0
        """Since the last commit."""
        self._refusals = 0
        self._isolated = 0
        """Records that are still to be processed one per transaction."""
        tools.health.expect(self.name)

    async def run(self, stop: asyncio.Event) -> None:
        """Own the task until ``stop``; then finish the current transaction and return.

        Raises FencedError when another owner has taken over, FatalError where no retry can help.
        """
        try:
            while not stop.is_set():
                try:
                    await self._open()
                    await self._serve(stop)
                except (TransactionFailedError, KafkaError, OSError, TimeoutError) as error:
                    refuse_forbidden(error)
                    await self._recover(error, stop)
        finally:
            self._tools.health.ready(self.name, ready=False)
            await self._close()
            self.processor.close()

    # ---- ownership --------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Fence the owner before, become the owner, restore the state, seek to the position (rule T2)."""
        began = time.monotonic()
        await self._refuse_if_superseded()
        self._producer = self._tools.clients.producer(self.identity.transactional_id)
        async with asyncio.timeout(self._tools.settings.deadline_seconds):
            await self._producer.start()
        self._epoch += 1
        owner = f"{self._owner}.{self._epoch}"
        await self._write([self._meta(OWNER, owner.encode())])
        self._tools.failpoints.reach(Failpoint.RESTORE_CLAIMED)
        scan = await self._changelog.to_owner(self._changelog_next if self._restored else None, owner)
        scan.live = await self._claim_check.resolve_all(scan.live)
        self._tools.failpoints.reach(Failpoint.RESTORE_READ)
        await self._restore_or_rollback(scan)
        await self._start_consumer()
        self._metrics.restored(time.monotonic() - began)
        self._log.info("task ready", state_keys=len(self.processor.state), offsets=self._position().offsets)
        self._tools.health.ready(self.name)

    async def _refuse_if_superseded(self) -> None:
        """A producer is re-created only while no other process owns the task after this one (rule T4)."""
        if self._changelog_next is None:
            self._changelog_next = await self._changelog.end()
        else:
            self._refuse_newer_owner(await self._changelog.to_end(self._changelog_next))

    def _refuse_newer_owner(self, scan: ChangelogScan) -> None:
        if any(not owner.startswith(self._owner) for owner in scan.owners):
            raise FencedError(f"task {self.name} is owned by another process now")

    async def _restore_or_rollback(self, scan: ChangelogScan) -> None:
        """Restore at the first start; later keep or undo the transaction in doubt, as the changelog has it."""
        committed = scan.position is not None or not self._restored
        if self._restored:
            self._refuse_newer_owner(scan)
            self._resolve_in_doubt(scan.position)
        else:
            await self.processor.restore(scan.live)
            self._committed, self._restored = scan.position, True
        self.processor.settle(self._committed, committed=committed)
        self._notes = self._notes.updated(scan.notes)
        self.processor.decide(self._notes.decided(self._committed.offsets if self._committed else {}))
        self._in_doubt = None
        self._changelog_next = scan.next_offset

    def _resolve_in_doubt(self, position: Position | None) -> None:
        if position is not None and position != self._in_doubt:
            raise FatalError(f"{self.name}: the changelog holds a position that this process never wrote")
        self._committed = position or self._committed

    async def _start_consumer(self) -> None:
        self._consumer = consumer = TaskConsumer(
            self.identity, self._tools.clients, self._tools.settings, self._claim_check
        )
        try:
            async with asyncio.timeout(2 * self._tools.settings.deadline_seconds):
                offsets = await consumer.open(self._committed.offsets if self._committed else None)
        except FatalError:
            await self._refuse_if_superseded()  # offsets that contradict the changelog may be a new owner's
            raise
        self._committed = replace(self._committed or Position({}), offsets=offsets)

    async def _recover(self, error: Exception, stop: asyncio.Event) -> None:
        self._failures += 1
        self._tools.health.ready(self.name, ready=False)
        self._metrics.failed()
        self._log.warning("the task failed and is started again", error=str(error), kind=type(error).__name__)
        await self._close(abandoned=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(0.1 * 2 ** min(self._failures, 10), MAX_BACKOFF))

    async def is_decided(self) -> bool:
        """Whether an operator has decided about the record that stopped this task, since it stopped.

        Raises FencedError where another process owns the task now.
        """
        assert self._changelog_next is not None  # noqa: S101  # it has committed
        scan = await self._changelog.to_end(self._changelog_next)
        self._refuse_newer_owner(scan)
        return scan.notes.get(DECISION) is not None

    async def _close(self, *, abandoned: bool = False) -> None:
        consumer, producer = self._consumer, self._producer
        self._consumer = self._producer = None
        if consumer is not None:
            await consumer.close()
        if producer is None:
            return
        await abandon(producer) if abandoned else await stop_producer(producer)

    # ---- processing -------------------------------------------------------------------------------------------------

    async def _serve(self, stop: asyncio.Event) -> None:
        consumer, loop = self._open_consumer(), asyncio.get_running_loop()
        while not stop.is_set():
            polled = await consumer.poll(1 if self._isolated else self._tools.settings.poll_records)
            if polled:
                await self._process(polled)
                await self._linger(len(polled), stop)
            self._metrics.progress(consumer.lag(), len(self.processor.state), self.processor.gauges)
            if loop.time() >= self._next_punctuation:
                self._next_punctuation = loop.time() + self._tools.settings.timer_seconds
                await self._punctuate()

    async def _linger(self, taken: int, stop: asyncio.Event) -> None:
        """Let records gather for the next transaction, unless they have gathered already."""
        settings = self._tools.settings
        if settings.linger_ms and taken < settings.poll_records:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), settings.linger_ms / 1000)

    async def _process(self, polled: Sequence[ConsumerRecord]) -> None:
        consumer, batch, now = self._open_consumer(), TransactionBatch(), asyncio.get_running_loop().time
        began = now()
        for raw in polled:
            record = await consumer.read(raw)
            try:
                self.processor.process(batch, record, consumer.slot(raw), consumer.topic_index(record))
            except DeadLetterLimitError as error:
                stop = stop_note(record, consumer.slot(raw), error.cause, self._tools.clock.now())
                batch.records += [self._meta(STOPPED, encode(stop, JSON)), self._meta(DECISION, None)]
                await self._commit(batch, polled)  # the dead letters up to the limit are there to be read
                raise
            if batch.size > MAX_TRANSACTION:
                await self._commit(batch, polled)
                batch = TransactionBatch()
            if now() - began > YIELD_SECONDS:
                await asyncio.sleep(0)
                began = now()
        batch.positions |= consumer.reached()
        await self._commit(batch, polled)

    async def _punctuate(self) -> None:
        batch = TransactionBatch()
        self.processor.punctuate(batch, self.context())
        if batch.records:
            await self._commit(batch, ())

    def context(self) -> TaskContext:
        return TaskContext(
            now=self._tools.clock.now(),
            partition=self.identity.number,
            positions=self._position().offsets,
            caught_up=self._open_consumer().caught_up,
            keeps_up=self._open_consumer().keeps_up,
        )

    async def _commit(self, batch: TransactionBatch, polled: Sequence[ConsumerRecord]) -> None:
        """One transaction: outputs, changelog, position and offsets (rule T3)."""
        offsets, budget = self._position().offsets | batch.positions, self.processor.budget
        self._in_doubt = position = Position(offsets, budget.level, budget.keys)
        passed = [self._meta(note, None) for note in NOTES] if self._notes.passed(offsets) else []
        began = time.monotonic()
        try:
            written = await self._write(
                [*passed, *batch.records, self._meta(POSITION, position.encode())],
                self._open_consumer().offsets(offsets),
            )
        except TransactionFailedError as error:
            self._handle_refusal(error, polled)
            raise
        self._changelog_next = written[-1] + 1
        self._committed, self._in_doubt = position, None
        self._notes = StopNotes() if passed else self._notes
        self.processor.settle(position, committed=True)
        self._refusals, self._failures, self._isolated = 0, 0, max(0, self._isolated - 1)
        self._metrics.committed(batch, time.monotonic() - began)

    def _handle_refusal(self, error: TransactionFailedError, polled: Sequence[ConsumerRecord]) -> None:
        """The broker refused a record for what it is.

        The second time, process one record per transaction from then on; quarantine the one that fails alone.
        """
        if not error.refused:
            return
        self._refusals += 1
        if self._isolated and len(polled) == 1:
            self.processor.quarantine(self._open_consumer().slot(polled[0]), polled[0].offset, str(error))
        elif self._refusals >= REFUSALS_BEFORE_ISOLATION:
            self._isolated = len(polled)
            if not polled:
                raise FatalError(f"{self.name}: the broker refuses what a timer or cut sends: {error}") from error

    async def _write(
        self, records: Sequence[ProducerRecord], offsets: dict[TopicPartition, int] | None = None
    ) -> list[int]:
        assert self._producer is not None  # noqa: S101  # opened before anything is written
        transaction = Transaction(self._producer, self._tools.settings.deadline_seconds, self._tools.failpoints)
        return await transaction.run(await self._claim_check.store_all(records), offsets, self.identity.group_id)

    # ---- parts and positions -------------------------------------------------------------------------------------

    def _meta(self, key: str, value: bytes | None) -> ProducerRecord:
        return ProducerRecord(self.identity.changelog.topic, self.identity.changelog.partition, key.encode(), value)

    def _open_consumer(self) -> TaskConsumer:
        assert self._consumer is not None  # noqa: S101  # serving starts after opening
        return self._consumer

    def _position(self) -> Position:
        assert self._committed is not None  # noqa: S101  # set by opening
        return self._committed
