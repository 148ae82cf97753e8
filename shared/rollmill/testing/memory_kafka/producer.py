"""aiokafka's transactional producer as the engine uses it, with the habits of the real one."""

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
from rollmill.testing.memory_kafka.log import Fate
from rollmill.testing.memory_kafka.network_link import NetworkLink


@dataclass(frozen=True)
class _Waiting:
    partition: TopicPartition
    key: bytes | None
    value: bytes | None
    headers: Headers
    future: asyncio.Future[RecordMetadata]


class MemoryProducer:
    """Commits although a send failed; is finished once fenced; its queue is delivered by a task of its own."""

    def __init__(self, broker: MemoryBroker, line: NetworkLink, transactional_id: str) -> None:
        self._broker, self._line, self._id = broker, line, transactional_id
        self._epoch = 0
        self._in_transaction = self._finished = False
        self._queue: list[_Waiting] = []
        self._broken: set[TopicPartition] = set()
        self._message_accumulator = self
        self._sender = self
        self.client = self
        self.sender_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._epoch = await self._line.call("start", lambda: self._broker.register(self._id))

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
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> asyncio.Future[RecordMetadata]:
        if not self._in_transaction:
            raise IllegalOperation("Can't send messages while not in transaction")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RecordMetadata] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append(_Waiting(TopicPartition(topic, partition or 0), key, value, tuple(headers), future))
        if self.sender_task is None or self.sender_task.done():
            self.sender_task = loop.create_task(self._deliver())
        return future

    async def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, int], group_id: str) -> None:
        self._check_usable()
        await self._call("offsets", lambda: self._broker.add_offsets(self._id, self._epoch, group_id, dict(offsets)))

    async def commit_transaction(self) -> None:
        await self._end("commit", Fate.COMMITTED)

    async def abort_transaction(self) -> None:
        await self._end("abort", Fate.ABORTED)

    async def stop(self) -> None:
        await self._flushed()
        self._finished = True

    async def close(self) -> None:
        """Of the client under it."""

    def fail_all(self, error: BaseException) -> None:
        """Of the accumulator under it: nothing that waits is ever sent."""
        waiting, self._queue = self._queue, []
        _fail(waiting, error)

    def _check_usable(self) -> None:
        if self._finished:
            raise AssertionError("Invalid state transition TransactionState.FATAL_ERROR")

    async def _end(self, name: str, fate: Fate) -> None:
        self._check_usable()
        await self._flushed()
        await self._call(name, lambda: self._broker.finish(self._id, self._epoch, fate))
        self._in_transaction = False

    async def _flushed(self) -> None:
        if self.sender_task is not None:
            await asyncio.wait([self.sender_task])

    async def _call(self, name: str, effect: Any) -> Any:
        try:
            return await self._line.call(name, effect)
        except Fenced:
            self._finished = True
            raise

    async def _deliver(self) -> None:
        """Requests of all that waits, one at a time."""
        while self._queue:
            waiting, self._queue = self._queue, []
            try:
                await self._call("send", lambda: self._append(waiting))  # noqa: B023  # called before the next turn
            except BaseException as error:  # noqa: BLE001  # whoever waits for a record has to know, death included
                _fail(waiting, error)

    def _append(self, waiting: Sequence[_Waiting]) -> None:
        """A refused record breaks its partition: what follows it there is out of order."""
        for item in waiting:
            if item.partition in self._broken:
                _fail([item], OutOfOrderSequenceNumber())
                continue
            try:
                offset = self._broker.append(self._id, self._epoch, item.partition, item.key, item.value, item.headers)
            except MessageSizeTooLargeError as error:
                self._broken.add(item.partition)
                _fail([item], error)
            else:
                _answer(item, offset)


def _answer(item: _Waiting, offset: int) -> None:
    if not item.future.done():
        where = item.partition
        item.future.set_result(RecordMetadata(where.topic, where.partition, where, offset, None, 0, None))


def _fail(waiting: Sequence[_Waiting], error: BaseException) -> None:
    for item in waiting:
        if not item.future.done():
            item.future.set_exception(error if isinstance(error, Exception) else KafkaError(repr(error)))
