"""The records of one group member that are being handled now: a task for each, bounded in number and in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from aiokafka import ConsumerRecord, TopicPartition

from rollmill.codec import Headers
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_evaluator.consumer.watermark import OffsetTracker


@dataclass(frozen=True)
class ReceivedRecord:
    """A record as it was read."""

    partition: int
    offset: int
    value: bytes | None
    headers: Headers

    @property
    def size(self) -> int:
        return len(self.value or b"")


HandleRecord = Callable[[ReceivedRecord], Awaitable[None]]
"""Returns when the record is finished. Its exception ends the consumer, so that no record is skipped."""


class RecordsInFlight:
    """Runs ``handle`` for each record in a task of its own. ``labels``: of the metrics."""

    def __init__(
        self, handle: HandleRecord, *, max_records: int, max_bytes: int, metrics: Metrics, labels: Mapping[str, str]
    ) -> None:
        self._handle, self._max_records, self._max_bytes = handle, max_records, max_bytes
        self._metrics, self._labels = metrics, labels
        self._tasks: dict[asyncio.Task[None], TopicPartition] = {}
        self._bytes = 0
        self._capacity_freed = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def free_records(self) -> int:
        """How many more records may be started."""
        return self._max_records - len(self._tasks)

    def has_capacity(self) -> bool:
        capacity = len(self._tasks) < self._max_records and self._bytes < self._max_bytes
        if not capacity:
            self._capacity_freed.clear()
        return capacity

    async def wait_for_capacity(self, seconds: float) -> bool:
        """True once a record has finished, False if none has within ``seconds``."""
        return await is_set_within(seconds, self._capacity_freed)

    def start(
        self, topic_partition: TopicPartition, record: ConsumerRecord[bytes, bytes], tracker: OffsetTracker
    ) -> None:
        """Handle a record, unless ``tracker`` says that it is finished or running already."""
        if not tracker.begin(record.offset):
            self._metrics.count("repeated_records", 1, **self._labels)
            return
        received = ReceivedRecord(topic_partition.partition, record.offset, record.value, tuple(record.headers))
        self._bytes += received.size
        name = f"{topic_partition.partition}/{record.offset}"
        task = asyncio.create_task(self._run_handler(received, tracker), name=name)
        self._tasks[task] = topic_partition
        task.add_done_callback(self._on_done)
        self._metrics.gauge("records_in_flight", len(self._tasks), **self._labels)

    async def _run_handler(self, received: ReceivedRecord, tracker: OffsetTracker) -> None:
        try:
            await self._handle(received)
            tracker.finish(received.offset)
            self._metrics.count("evaluator_records", 1, **self._labels)
        finally:
            self._bytes -= received.size

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._capacity_freed.set()
        self._metrics.gauge("records_in_flight", len(self._tasks), **self._labels)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def fail(self, error: BaseException | None) -> None:
        """Keep ``error`` for `raise_failure`; the first one counts."""
        self._failure = self._failure or error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def cancel(self, topic_partitions: Collection[TopicPartition]) -> None:
        """Cancel the records of these partitions; their new owner handles them again."""
        for task, topic_partition in self._tasks.items():
            if topic_partition in topic_partitions:
                task.cancel()

    async def drain(self, seconds: float) -> None:
        """Let running records finish for ``seconds``; the others go on."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)

    async def cancel_all(self, seconds: float) -> None:
        """Cancel what runs, and wait for ``seconds`` at most until it has ended."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=seconds)


async def is_set_within(seconds: float, event: asyncio.Event) -> bool:
    """True once ``event`` is set, False if that takes longer than ``seconds``."""
    if event.is_set():
        return True
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
