"""Writes events to Kafka, or to the spool while Kafka is away; each is acknowledged by one of them (rule S5).

`LogEventWriter` chooses between the two, `KafkaEventProducer` is the way to Kafka: one idempotent producer, every wait
bounded, replaced when it is finished (rule T5). A producer that only waits for its broker is kept: it delivers in order
when the broker is back. One that has failed for good (a lost sequence number, say) would fail for ever; its successor
writes what it left, and readers recognise duplicates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from rollmill.codec import CONTENT_TYPE, Headers
from rollmill.errors import BackpressureError, RetryableError
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import abandon, stop_producer
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import REGISTRY, Topic
from rollmill_capture.event_log.spool import Spool, SpoolFailedError
from rollmill_capture.event_log.spooled_record import SpooledRecord

_REFUSALS = (MessageSizeTooLargeError, RecordListTooLargeError)


class NotAcknowledgedError(RetryableError):
    """Kafka did not confirm the record in time; it may be there all the same (rule T5)."""


class RefusedRecordError(NotAcknowledgedError):
    """Kafka will not take this record, however often it is sent."""


class LogAwayError(BackpressureError):
    """Kafka is away, and there is no spool. The name is a value of the label ``reason`` of ``turned_away``."""


class EventWriter(Protocol):
    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        """Append a record; returns once it is acknowledged. Raises NotAcknowledgedError.

        To be called inside ``reserve_space``; then a spool refuses nothing unless its disk fails.
        """
        ...

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        """Append a record, or a tombstone, that loses its meaning with time: to Kafka or not at all, never spooled.

        Raises NotAcknowledgedError.
        """
        ...

    def reserve_space(self, size: int) -> AbstractContextManager[None]:
        """Inside, there is a place for records of ``size`` bytes, whatever becomes of Kafka (rule S5).

        Raises BackpressureError where there is none.
        """
        ...


class EventProducer(Protocol):
    """Kafka, as the event writer needs it: `KafkaEventProducer` is one. Topics are named without the prefix."""

    async def send(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None: ...

    async def send_all(self, records: Sequence[tuple[str, str, bytes]]) -> None: ...

    async def is_reachable(self) -> bool: ...

    async def replace(self) -> None: ...


@dataclass
class LogEventWriter:
    """Sends to Kafka while that answers. `SpoolDrain` has to run beside it: it sends what was spooled."""

    producer: EventProducer
    spool: Spool | None
    metrics: Metrics
    away: bool = False
    """Kafka did not acknowledge, and nothing has been acknowledged since."""
    failpoints: Failpoints = field(default_factory=Failpoints)
    drain_needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there may be something to do for `SpoolDrain`."""

    def __post_init__(self) -> None:
        if self.spool is not None:
            self.show_spool(self.spool)
            if self.spool.records:
                self.drain_needed.set()

    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        self.failpoints.reach(Failpoint.CAPTURE_BEFORE_ACKNOWLEDGEMENT)
        if self._has_to_spool(key):
            await self._put(SpooledRecord(topic.name, key, value))
        else:
            try:
                await self.producer.send(topic.name, key, value)
            except RefusedRecordError:
                raise
            except NotAcknowledgedError as error:
                self.mark_away(error)
                if self.spool is None:
                    raise
                await self._put(SpooledRecord(topic.name, key, value))
            else:
                self.metrics.count("written_records", topic=topic.name)
        self.failpoints.reach(Failpoint.CAPTURE_AFTER_ACKNOWLEDGEMENT)

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        if self.away or self._has_to_spool(key):
            raise NotAcknowledgedError("Kafka is away")
        try:
            await self.producer.send(topic.name, key, value, headers)
        except NotAcknowledgedError as error:
            self.mark_away(error)
            raise
        self.metrics.count("written_records", topic=topic.name)

    @contextmanager
    def reserve_space(self, size: int) -> Iterator[None]:
        """Reserved while Kafka answers, too: it may go away before the record comes."""
        if self.spool is None:
            if self.away:
                raise LogAwayError("Kafka is away, and no spool is configured (ROLLMILL_SPOOL_DIR)", retry_after=5)
            yield
            return
        with self.spool.reserve_space(size):
            yield

    async def wait_drained(self, seconds: float | None = None) -> bool:
        """Wait until nothing is spooled; False: ``seconds`` were over before."""
        if self.spool is None:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self.spool.empty.wait()
        except TimeoutError:
            return False
        return True

    def mark_away(self, error: Exception) -> None:
        if not self.away:
            structlog.get_logger().error("Kafka is away", error=str(error), spooling=self.spool is not None)
        self.away = True
        self.drain_needed.set()
        self.metrics.gauge("kafka_away", 1)

    def show_spool(self, spool: Spool) -> None:
        self.metrics.gauge("spool_bytes", spool.used)
        self.metrics.gauge("spool_records", spool.records)
        self.metrics.gauge("spool_damaged_records", spool.damage.rows)
        self.metrics.gauge("spool_damaged_files", spool.damage.files)
        self.metrics.gauge("spool_saved_records", spool.damage.saved)

    def _has_to_spool(self, key: str) -> bool:
        """Records behind spooled ones of the same key are spooled too, so that they stay in order."""
        return self.spool is not None and (self.away or self.spool.holds(key))

    async def _put(self, record: SpooledRecord) -> None:
        if self.spool is None:
            raise RuntimeError("a record is spooled only where there is a spool")
        try:
            await self.spool.put(record)
        except SpoolFailedError as error:
            raise NotAcknowledgedError(f"Kafka is away, and {error}") from error
        self.drain_needed.set()
        self.metrics.count("spooled_records")
        self.show_spool(self.spool)


class KafkaEventProducer:
    """Use as ``async with``. Topics are named without the prefix. ``seconds`` bounds every wait for Kafka."""

    def __init__(self, clients: KafkaClients, prefix: str, seconds: float) -> None:
        self._clients = clients
        self._seconds = seconds
        self._topics = {
            topic.name: (topic.full_name(prefix), [(CONTENT_TYPE, topic.format.encode())]) for topic in REGISTRY
        }
        self._producer: AIOKafkaProducer | None = None
        self._replacing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._producer = await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._producer is not None:
            await stop_producer(self._producer)
        await asyncio.gather(*self._leaving)

    async def send(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None:
        """Returns once all in-sync replicas have the record, or tombstone. Raises NotAcknowledgedError."""
        await self._send([(topic, key, value, headers)])

    async def send_all(self, records: Sequence[tuple[str, str, bytes]]) -> None:
        """The same for several, in order. After an error each of them may be there or not."""
        await self._send([(*record, ()) for record in records])

    async def is_reachable(self) -> bool:
        """Whether some broker answers now."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._current().client.fetch_all_metadata()
        except (TimeoutError, KafkaError):
            return False
        return True

    async def replace(self, finished: AIOKafkaProducer | None = None) -> None:
        """A new producer in place of ``finished`` (None: of whichever there is), unless it was replaced meanwhile."""
        async with self._replacing:
            producer = self._producer
            if producer is None or (finished is not None and producer is not finished):
                return
            structlog.get_logger().warning("the producer is finished and replaced")
            try:
                async with asyncio.timeout(self._seconds):
                    self._producer = await self._start()
            except (TimeoutError, KafkaError):
                return
        leaving = asyncio.create_task(abandon(producer))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _send(self, records: Sequence[tuple[str, str, bytes | None, Headers]]) -> None:
        producer, futures = self._current(), list[asyncio.Future[Any]]()
        try:
            async with asyncio.timeout(self._seconds):
                for topic, key, value, headers in records:
                    name, common = self._topics[topic]
                    futures.append(await producer.send(name, value, key.encode(), headers=[*common, *headers]))
                if len(futures) == 1:
                    await futures[0]
                else:
                    await asyncio.gather(*futures)
        except TimeoutError as error:
            raise NotAcknowledgedError(f"Kafka did not acknowledge within {self._seconds:g} s") from error
        except _REFUSALS as error:
            raise RefusedRecordError(f"Kafka refuses the record: {error!r}") from error
        except (KafkaError, IllegalOperation) as error:
            if not getattr(error, "retriable", False):
                await self.replace(producer)
            raise NotAcknowledgedError(f"Kafka did not take the record: {error!r}") from error

    async def _start(self) -> AIOKafkaProducer:
        producer = self._clients.producer(linger_ms=0)
        await producer.start()
        return producer

    def _current(self) -> AIOKafkaProducer:
        if self._producer is None:
            raise RuntimeError("the producer is used inside `async with`")
        return self._producer
