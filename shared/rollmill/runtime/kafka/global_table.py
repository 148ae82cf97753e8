"""Reads a whole topic and follows it: all records pass through ``apply`` in the order of each partition.

Every reader reads all partitions from the beginning, alone (no group). Nothing is kept here but positions, so a
restart reads everything again. For compacted topics (``sessions``) and those kept for ever (``policies``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.codec import Headers, decode
from rollmill.errors import PoisonRecordError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import Topic

POLL_MS = 200
"""Longest wait for records, and so for the stop signal."""

Apply = Callable[[str, Any], None]
"""Takes a key and the decoded value; None is a tombstone."""

Forget = Callable[[str, Headers], None]
"""Takes the key and the headers of a tombstone."""

Refuse = Callable[[str, PoisonRecordError], None]
"""Takes the key of a record that cannot be read or applied, which is passed over, and why."""


class GlobalTable:
    """Feeds all records of ``topic`` to ``apply``. ``run`` reads; the other methods tell how far it has read.

    ``from_end``: only those that come after the start. ``forget``: takes the tombstones in place of ``apply``, where
    their headers matter.
    """

    def __init__(
        self,
        clients: KafkaClients,
        settings: KafkaSettings,
        topic: Topic,
        apply: Apply,
        refuse: Refuse,
        *,
        from_end: bool = False,
        forget: Forget | None = None,
    ) -> None:
        self._clients = clients
        self._topic = topic
        self._apply = apply
        self._refuse = refuse
        self._from_end = from_end
        self._forget = forget
        name = topic.full_name(settings.prefix)
        self._partitions = [TopicPartition(name, number) for number in range(topic.partitions(settings))]
        self._positions: dict[int, int] = {}
        self._moved = asyncio.Condition()
        self._consumer: AIOKafkaConsumer | None = None
        self._started = asyncio.Event()
        self._caught_up = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set. Raises aiokafka's errors where the topic cannot be read."""
        async with self._clients.reading(reset="earliest") as consumer:
            consumer.assign(self._partitions)
            if self._from_end:
                await consumer.seek_to_end()
            self._consumer = consumer
            self._started.set()
            await self._follow(consumer, await self.end_offsets(), stop)

    async def caught_up(self) -> None:
        """Wait until everything is read that was there when the reader started."""
        await self._caught_up.wait()

    async def end_offsets(self) -> dict[int, int]:
        """Next offset of each partition on the broker, now."""
        await self._started.wait()
        if self._consumer is None:
            raise RuntimeError("the reader has started without a consumer")
        ends = await self._consumer.end_offsets(self._partitions)
        return {place.partition: offset for place, offset in ends.items()}

    async def reached(self, ends: Mapping[int, int]) -> None:
        """Wait until every record below ``ends`` (partition to offset) went through ``apply``."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._is_past(ends))

    def _is_past(self, ends: Mapping[int, int]) -> bool:
        return all(self._positions.get(number, 0) >= end for number, end in ends.items())

    async def _follow(self, consumer: AIOKafkaConsumer, ends: Mapping[int, int], stop: asyncio.Event) -> None:
        while not stop.is_set():
            polled = await consumer.getmany(timeout_ms=POLL_MS)
            for records in polled.values():
                for record in records:
                    self._take(record)
            await self._move(consumer)
            if not self._caught_up.is_set() and self._is_past(ends):
                self._caught_up.set()

    async def _move(self, consumer: AIOKafkaConsumer) -> None:
        # A transaction's marker has an offset and no record: only the consumer's own position counts it.
        for place in self._partitions:
            self._positions[place.partition] = await consumer.position(place)
        async with self._moved:
            self._moved.notify_all()

    def _take(self, record: ConsumerRecord[bytes, bytes]) -> None:
        """Whatever is wrong with a record, it is passed over: the topic keeps it, and every start reads it again."""
        key = (record.key or b"").decode("utf-8", "replace")
        try:
            if record.value is None and self._forget is not None:
                self._forget(key, tuple(record.headers))
            else:
                self._apply(key, self._read(record.value, tuple(record.headers)))
        except PoisonRecordError as error:
            self._refuse(key, error)
        except Exception as error:  # noqa: BLE001  # of the table: a record that it does not expect
            self._refuse(key, PoisonRecordError("invalid", f"{type(error).__name__}: {error}"))

    def _read(self, value: bytes | None, headers: Headers) -> Any:
        return None if value is None else decode(self._topic.model, value, headers)
