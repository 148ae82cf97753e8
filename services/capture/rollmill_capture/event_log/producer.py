"""Kafka as capture writes to it: one idempotent producer, every wait bounded, replaced when it is finished (rule T5).

A producer that only waits for its broker is kept: it delivers in order when the broker is back. One that has failed for
good (a sequence number lost, say) would fail for ever; its successor writes what it left, and readers tell duplicates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from rollmill.codec import CONTENT_TYPE, Headers
from rollmill.errors import RetryableError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import abandon, stop_producer
from rollmill.topics import REGISTRY

_REFUSALS = (MessageSizeTooLargeError, RecordListTooLargeError)


class NotAcknowledgedError(RetryableError):
    """The log did not confirm the record in time; it may be there all the same (rule T5)."""


class RefusedRecordError(NotAcknowledgedError):
    """The log will not take this record, however often it is sent."""


class KafkaEventProducer:
    """Use as ``async with``. Topics are named without the prefix."""

    def __init__(self, clients: KafkaClients, prefix: str, seconds: float) -> None:
        self._clients = clients
        self._seconds = seconds
        self._places = {
            topic.name: (topic.full_name(prefix), [(CONTENT_TYPE, topic.format.encode())]) for topic in REGISTRY
        }
        self._producer: AIOKafkaProducer | None = None
        self._replacing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._producer = await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._producer is not None:
            await stop_producer(self._producer)
        await asyncio.gather(*self._leaving)

    async def send(self, topic: str, key: str, value: bytes) -> None:
        """Returns once all in-sync replicas have the record. Raises NotAcknowledgedError."""
        await self.send_all(((topic, key, value),))

    async def append_best_effort(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None:
        """The same for a record that may be a tombstone, with headers of its own."""
        await self._send_all([(topic, key, value, headers)])

    async def send_all(self, records: Sequence[tuple[str, str, bytes]]) -> None:
        """The same for several, in order. After an error each of them may be there or not."""
        await self._send_all([(*record, ()) for record in records])

    async def _send_all(self, records: Sequence[tuple[str, str, bytes | None, Headers]]) -> None:
        producer = self._current()
        try:
            async with asyncio.timeout(self._seconds):
                futures = [await self._sent(producer, *record) for record in records]
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

    async def answers(self) -> bool:
        """Whether some broker answers now."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._current().client.fetch_all_metadata()
        except (TimeoutError, KafkaError):
            return False
        return True

    async def replace(self, finished: AIOKafkaProducer | None = None) -> None:
        """A new producer in place of ``finished`` (None: of whichever there is), unless somebody was faster."""
        async with self._replacing:
            producer = self._producer
            if producer is None or (finished is not None and producer is not finished):
                return
            structlog.get_logger().warning("the producer is finished and replaced")
            try:
                async with asyncio.timeout(self._seconds):
                    self._producer = await self._started()
            except (TimeoutError, KafkaError):
                return
        leaving = asyncio.create_task(abandon(producer))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _sent(
        self, producer: AIOKafkaProducer, topic: str, key: str, value: bytes | None, more: Headers
    ) -> asyncio.Future[Any]:
        name, headers = self._places[topic]
        sent: asyncio.Future[Any] = await producer.send(name, value, key.encode(), headers=[*headers, *more])
        return sent

    async def _started(self) -> AIOKafkaProducer:
        producer = self._clients.producer(linger_ms=0)
        await producer.start()
        return producer

    def _current(self) -> AIOKafkaProducer:
        if self._producer is None:
            raise RuntimeError("the log is used inside `async with`")
        return self._producer
