"""aiokafka's consumer as the engine uses it: assigned partitions, committed reads, explicit positions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.log import LogEntry
from rollmill.testing.memory_kafka.network_link import NetworkLink

RecordsByPartition = dict[TopicPartition, list[ConsumerRecord]]


class MemoryConsumer:
    """Without a group to rebalance; ``group_id`` is for `committed`."""

    def __init__(self, broker: MemoryBroker, link: NetworkLink, group_id: str | None) -> None:
        self._broker, self._link, self._group_id = broker, link, group_id
        self._positions: dict[TopicPartition, int] = {}
        self._highs: dict[TopicPartition, int] = {}
        self._answered_at: dict[TopicPartition, float] = {}

    async def start(self) -> None:
        await self._link.call("look", lambda: None)

    async def stop(self) -> None:
        """Has nothing to release."""

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._positions = dict.fromkeys(partitions, 0)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self._positions |= await self.beginning_offsets(partitions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition] = offset

    async def position(self, partition: TopicPartition) -> int:
        return self._positions[partition]

    def highwater(self, partition: TopicPartition) -> int | None:
        return self._highs.get(partition)

    def last_poll_timestamp(self, partition: TopicPartition) -> int | None:
        """Milliseconds by the wall clock."""
        at = self._answered_at.get(partition)
        return None if at is None else int(at * 1000)

    async def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._link.call("look", lambda: {item: self._broker.logs[item].start for item in partitions})

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offsets: where reading with read_committed ends."""
        logs = self._broker.logs
        return await self._link.call("look", lambda: {item: logs[item].last_stable() for item in partitions})

    async def committed(self, partition: TopicPartition) -> int | None:
        return await self._link.call("look", lambda: self._broker.offsets[self._group_id or ""].get(partition))

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> RecordsByPartition:
        wanted = partitions or tuple(self._positions)
        found = await self._link.call("fetch", lambda: self._read(wanted, max_records))
        if found or not timeout_ms:
            return found
        await asyncio.sleep(timeout_ms / 1000)
        return await self._link.call("fetch", lambda: self._read(wanted, max_records))

    def _read(self, partitions: Sequence[TopicPartition], max_records: int | None) -> RecordsByPartition:
        found: RecordsByPartition = {}
        left = max_records
        for partition in partitions:
            entries = self._read_one(partition, left)
            if entries:
                found[partition] = [_record(partition, entry) for entry in entries]
                left = None if left is None else left - len(entries)
        return found

    def _read_one(self, partition: TopicPartition, limit: int | None) -> Sequence[LogEntry]:
        log = self._broker.logs[partition]
        if self._positions[partition] < log.start:
            raise OffsetOutOfRangeError({partition: self._positions[partition]})
        if limit == 0:
            return []
        entries, self._positions[partition] = log.read(self._positions[partition], limit)
        self._highs[partition] = log.end
        self._answered_at[partition] = time.time()
        return entries


def _record(partition: TopicPartition, entry: LogEntry) -> ConsumerRecord:
    key, value = entry.key, entry.value
    return ConsumerRecord(
        topic=partition.topic,
        partition=partition.partition,
        offset=entry.offset,
        timestamp=0,
        timestamp_type=0,
        key=key,
        value=value,
        checksum=None,
        serialized_key_size=-1 if key is None else len(key),
        serialized_value_size=-1 if value is None else len(value),
        headers=entry.headers,
    )
