"""aiokafka's transactional producer as the engine uses it, with the quirks of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalOperation, KafkaError, MessageSizeTooLargeError, OutOfOrderSequenceNumber
from aiokafka.errors import ProducerFenced as Fenced
from aiokafka.structs import RecordMetadata

from rollmill.codec import Headers
from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.log import TransactionStatus
from rollmill.testing.memory_kafka.network_link import NetworkLink


@dataclass(frozen=True)
class _QueuedRecord:
    partition: TopicPartition
    key: bytes | None
    value: bytes | None
    headers: Headers
    future: asyncio.Future[RecordMetadata]


class MemoryProducer:
    """As aiokafka: commits although a send failed, is unusable once fenced, sends its queue in a task of its own."""

    def __init__(self, broker: MemoryBroker, link: NetworkLink, transactional_id: str) -> None:
        self._broker, self._link, self._id = broker, link, transactional_id
        self._epoch = 0
        self._in_transaction = self._finished = False
        self._queue: list[_QueuedRecord] = []
        self._out_of_sequence: set[TopicPartition] = set()
        self._message_accumulator = self
        self._sender = self
        self.client = self
        self.sender_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._epoch = await self._link.call("start", lambda: self._broker.register(self._id))

    async def begin_transaction(self) -> None:
        self._check_usable()
        if self._in_transaction:
            raise AssertionError("Invalid state transition")
        self._in_transaction = True

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> asyncio.Future[RecordMetadata]:
        if not self._in_transaction:
            raise IllegalOperation("Can't send messages while not in transaction")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RecordMetadata] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append(_QueuedRecord(TopicPartition(topic, partition or 0), key, value, tuple(headers), future))
        if self.sender_task is None or self.sender_task.done():
            self.sender_task = loop.create_task(self._deliver())
        return future

    async def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, int], group_id: str) -> None:
        self._check_usable()
        await self._call("offsets", lambda: self._broker.add_offsets(self._id, self._epoch, group_id, dict(offsets)))

    async def commit_transaction(self) -> None:
        await self._end("commit", TransactionStatus.COMMITTED)

    async def abort_transaction(self) -> None:
        await self._end("abort", TransactionStatus.ABORTED)

    async def stop(self) -> None:
        await self._flushed()
        self._finished = True

    async def close(self) -> None:
        """The client of aiokafka has this method, and the engine calls it; this object is its own client."""

    def fail_all(self, error: BaseException) -> None:
        """The accumulator of aiokafka has this method: the queued records are failed and never sent."""
        queued, self._queue = self._queue, []
        _fail(queued, error)

    def _check_usable(self) -> None:
        if self._finished:
            raise AssertionError("Invalid state transition TransactionState.FATAL_ERROR")

    async def _end(self, name: str, status: TransactionStatus) -> None:
        self._check_usable()
        await self._flushed()
        await self._call(name, lambda: self._broker.finish(self._id, self._epoch, status))
        self._in_transaction = False

    async def _flushed(self) -> None:
        if self.sender_task is not None:
            await asyncio.wait([self.sender_task])

    async def _call(self, name: str, effect: Any) -> Any:
        try:
            return await self._link.call(name, effect)
        except Fenced:
            self._finished = True
            raise

    async def _deliver(self) -> None:
        """Send all queued records, one request at a time."""
        while self._queue:
            queued, self._queue = self._queue, []
            try:
                await self._call("send", lambda: self._append(queued))  # noqa: B023  # called before the next iteration
            except BaseException as error:  # noqa: BLE001  # the futures must end, also when the process is killed
                _fail(queued, error)

    def _append(self, queued: Sequence[_QueuedRecord]) -> None:
        """After a refused record, later ones to its partition are out of sequence."""
        for item in queued:
            if item.partition in self._out_of_sequence:
                _fail([item], OutOfOrderSequenceNumber())
                continue
            try:
                offset = self._broker.append(self._id, self._epoch, item.partition, item.key, item.value, item.headers)
            except MessageSizeTooLargeError as error:
                self._out_of_sequence.add(item.partition)
                _fail([item], error)
            else:
                _acknowledge(item, offset)


def _acknowledge(item: _QueuedRecord, offset: int) -> None:
    if not item.future.done():
        where = item.partition
        item.future.set_result(RecordMetadata(where.topic, where.partition, where, offset, None, 0, None))


def _fail(queued: Sequence[_QueuedRecord], error: BaseException) -> None:
    for item in queued:
        if not item.future.done():
            item.future.set_exception(error if isinstance(error, Exception) else KafkaError(repr(error)))
