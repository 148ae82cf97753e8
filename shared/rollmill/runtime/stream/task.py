"""The loop: poll, process, one transaction, again. One `Task` owns one task's producer, consumer and state."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog
from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from rollmill.errors import FatalError, FencedError
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.kafka.clients import KafkaClients
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
from rollmill.runtime.stream.claims import TaskClaimCheck
from rollmill.runtime.stream.processor import Processor, TaskContext
from rollmill.runtime.stream.task_consumer import TaskConsumer
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings

V = TypeVar("V")

log = structlog.get_logger(__name__)

MAX_TRANSACTION = 32 * 2**20
"""Output bytes after which a poll batch is committed in parts."""
REFUSALS_BEFORE_ISOLATION = 2
MAX_BACKOFF = 15.0
GAUGE_SECONDS = 2.0
"""How often a stage is asked for what its state shows."""


@dataclass(frozen=True)
class TaskTools:
    """What a task needs from its process."""

    settings: ServiceSettings
    clients: KafkaClients
    clock: Clock
    metrics: Metrics
    health: Health
    failpoints: Failpoints = field(default_factory=Failpoints)


class Task(Generic[V]):
    """Runs one task until it is told to stop, fenced, or beyond help."""

    def __init__(self, stage: Processor[V, Any], identity: TaskIdentity, tools: TaskTools) -> None:
        self.stage, self.identity, self._tools = stage, identity, tools
        self.part = f"{identity.stage}.{identity.number}"
        self.fold = BatchProcessor(stage, identity, tools.settings)
        self._owner, self._claims = uuid.uuid4().hex, 0
        self._log = log.bind(task=self.part)
        self._producer: AIOKafkaProducer | None = None
        self._intake: TaskConsumer | None = None
        self._committed: Position | None = None
        self._attempted: Position | None = None
        self._changelog = ChangelogReader(tools.clients, identity.changelog, tools.settings.deadline_seconds)
        self._changelog_next: int | None = None
        """Changelog offset from which on nothing is known; claims of others behind it fence this process."""
        self._restored = False
        self._blobs = TaskClaimCheck.of(tools.settings)
        self._next_tick = self._next_gauges = 0.0
        self._failures = 0
        """Since the last commit."""
        self._refusals = 0
        self._isolated = 0
        """Records that still go one per transaction."""
        tools.health.expect(self.part)

    async def run(self, stop: asyncio.Event) -> None:
        """Own the task until ``stop``; then finish the transaction in hand and leave.

        Raises FencedError when another owner has taken over, FatalError when nothing sensible can be done.
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
            self._tools.health.ready(self.part, ready=False)
            await self._close()
            self.fold.close()

    # ---- owning --------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Fence, claim, restore, seek (rule T2)."""
        began = time.monotonic()
        await self._refuse_if_superseded()
        self._producer = self._tools.clients.producer(self.identity.transactional_id)
        async with asyncio.timeout(self._tools.settings.deadline_seconds):
            await self._producer.start()
        self._claims += 1
        claim = f"{self._owner}.{self._claims}"
        await self._write([self._meta(OWNER, claim.encode())])
        self._tools.failpoints.reach(Failpoint.RESTORE_CLAIMED)
        tail = await self._changelog.to_owner(self._changelog_next if self._restored else None, claim)
        tail.live = await self._blobs.resolve_all(tail.live)
        self._tools.failpoints.reach(Failpoint.RESTORE_READ)
        await self._restore_or_rollback(tail)
        await self._seek()
        self._tools.metrics.observe("restore_seconds", time.monotonic() - began)
        self._log.info("task ready", state_keys=len(self.fold.state), offsets=self._position().offsets)
        self._tools.health.ready(self.part)

    async def _refuse_if_superseded(self) -> None:
        """A producer is re-created only while nobody has claimed the task after this process (rule T4)."""
        if self._changelog_next is None:
            self._changelog_next = await self._changelog.end()
        else:
            self._refuse_claims(await self._changelog.to_end(self._changelog_next))

    def _refuse_claims(self, tail: ChangelogScan) -> None:
        if any(not owner.startswith(self._owner) for owner in tail.owners):
            raise FencedError(f"task {self.part} is owned by another process now")

    async def _restore_or_rollback(self, tail: ChangelogScan) -> None:
        """Restore at the first start; later find out whether the transaction in doubt was committed."""
        committed = tail.position is not None or not self._restored
        if self._restored:
            self._refuse_claims(tail)
            self._resolve_in_doubt(tail.position)
        else:
            await self.fold.restore(tail.live)
            self._committed, self._restored = tail.position, True
        self.fold.settle(self._level(), committed=committed)
        self._attempted = None
        self._changelog_next = tail.next_offset

    def _resolve_in_doubt(self, position: Position | None) -> None:
        if position is not None and position != self._attempted:
            raise FatalError(f"{self.part}: the changelog holds a position that this process never wrote")
        self._committed = position or self._committed

    async def _seek(self) -> None:
        self._intake = intake = TaskConsumer(self.identity, self._tools.clients, self._tools.settings)
        try:
            async with asyncio.timeout(2 * self._tools.settings.deadline_seconds):
                offsets = await intake.open(self._committed.offsets if self._committed else None)
        except FatalError:
            await self._refuse_if_superseded()  # what contradicts the changelog may be a new owner's work
            raise
        self._committed = Position(offsets, self._level())

    async def _recover(self, error: Exception, stop: asyncio.Event) -> None:
        self._failures += 1
        self._tools.health.ready(self.part, ready=False)
        self._tools.metrics.count("task_failures", task=self.part)
        self._log.warning("task failed, starting it again", error=str(error), kind=type(error).__name__)
        await self._close(abandoned=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(0.1 * 2 ** min(self._failures, 10), MAX_BACKOFF))

    async def _close(self, *, abandoned: bool = False) -> None:
        intake, producer = self._intake, self._producer
        self._intake = self._producer = None
        if intake is not None:
            await intake.close()
        if producer is None:
            return
        await abandon(producer) if abandoned else await stop_producer(producer)

    # ---- serving -------------------------------------------------------------------------------------------------

    async def _serve(self, stop: asyncio.Event) -> None:
        intake, loop = self._opened(), asyncio.get_running_loop()
        while not stop.is_set():
            batch = await intake.poll(1 if self._isolated else self._tools.settings.poll_records)
            if batch:
                await self._process(batch)
                await self._linger(len(batch), stop)
            self._report(intake)
            if loop.time() >= self._next_tick:
                self._next_tick = loop.time() + self._tools.settings.timer_seconds
                await self._tick()

    async def _linger(self, taken: int, stop: asyncio.Event) -> None:
        """Let records gather for the next transaction, unless they have gathered already."""
        settings = self._tools.settings
        if settings.linger_ms and taken < settings.poll_records:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), settings.linger_ms / 1000)

    async def _process(self, batch: Sequence[ConsumerRecord]) -> None:
        intake, work, now = self._opened(), TransactionBatch(), asyncio.get_running_loop().time
        began = now()
        for raw in batch:
            record = await self._blobs.resolved(intake.record(raw))
            self.fold.take(work, record, intake.slot(raw), intake.topic_index(record))
            if work.size > MAX_TRANSACTION:
                await self._commit(work, batch)
                work = TransactionBatch()
            if now() - began > YIELD_SECONDS:
                await asyncio.sleep(0)
                began = now()
        work.positions |= intake.reached()
        await self._commit(work, batch)

    async def _tick(self) -> None:
        work = TransactionBatch()
        self.fold.punctuate(work, self.view())
        if work.records:
            await self._commit(work, ())

    def view(self) -> TaskContext:
        return TaskContext(
            now=self._tools.clock.now(),
            partition=self.identity.number,
            positions=self._position().offsets,
            caught_up=self._opened().caught_up,
            keeps_up=self._opened().keeps_up,
        )

    async def _commit(self, work: TransactionBatch, batch: Sequence[ConsumerRecord]) -> None:
        """One transaction: outputs, changelog, position and offsets (rule T3)."""
        offsets = self._position().offsets | work.positions
        self._attempted = position = Position(offsets, self.fold.budget.level)
        began = time.monotonic()
        try:
            written = await self._write(
                [*work.records, self._meta(POSITION, position.encode())], self._opened().offsets(offsets)
            )
        except TransactionFailedError as error:
            self._refused(error, batch)
            raise
        self._changelog_next = written[-1] + 1
        self._committed, self._attempted = position, None
        self.fold.settle(position.dead_letter_level, committed=True)
        self._refusals, self._failures, self._isolated = 0, 0, max(0, self._isolated - 1)
        self._tools.metrics.observe("transaction_seconds", time.monotonic() - began)
        self._count(work)

    def _refused(self, error: TransactionFailedError, batch: Sequence[ConsumerRecord]) -> None:
        """The broker said no for good: isolate the batch after the second time, then set its culprit aside."""
        if not error.refused:
            return
        self._refusals += 1
        if self._isolated and len(batch) == 1:
            self.fold.quarantine(self._opened().slot(batch[0]), batch[0].offset, str(error))
        elif self._refusals >= REFUSALS_BEFORE_ISOLATION:
            self._isolated = len(batch)
            if not batch:
                raise FatalError(f"{self.part}: the broker refuses what a timer or cut sends: {error}") from error

    async def _write(
        self, records: Sequence[ProducerRecord], offsets: dict[TopicPartition, int] | None = None
    ) -> list[int]:
        assert self._producer is not None  # noqa: S101  # opened before anything is written
        transaction = Transaction(self._producer, self._tools.settings.deadline_seconds, self._tools.failpoints)
        return await transaction.run(await self._blobs.store_all(records), offsets, self.identity.group_id)

    # ---- small things --------------------------------------------------------------------------------------------

    def _level(self) -> float:
        return self._committed.dead_letter_level if self._committed else 0.0

    def _meta(self, key: str, value: bytes) -> ProducerRecord:
        return ProducerRecord(self.identity.changelog.topic, self.identity.changelog.partition, key.encode(), value)

    def _opened(self) -> TaskConsumer:
        assert self._intake is not None  # noqa: S101  # serving starts after opening
        return self._intake

    def _position(self) -> Position:
        assert self._committed is not None  # noqa: S101  # set by opening
        return self._committed

    def _count(self, work: TransactionBatch) -> None:
        metrics = self._tools.metrics
        metrics.count("transactions")
        for topic, records in work.inputs.items():
            metrics.count("records", records, topic=topic)
        for topic, records in Counter(record.topic for record in work.records).items():
            metrics.count("written_records", records, topic=topic.removeprefix(self._tools.settings.prefix))
        metrics.count_all(work.counts)
        for name, value in work.observed:
            metrics.observe(name, value)

    def _report(self, intake: TaskConsumer) -> None:
        for slot, lag in intake.lag().items():
            topic, _, partition = slot.rpartition("/")
            self._tools.metrics.gauge("lag_records", lag, topic=topic, partition=partition)
        self._tools.metrics.gauge("state_keys", len(self.fold.state), task=self.part)
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + GAUGE_SECONDS
            for name, value in self.fold.gauges().items():
                self._tools.metrics.gauge(name, value, task=self.part)
