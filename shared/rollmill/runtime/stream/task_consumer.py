"""A task's consumer: assigned partitions, an explicit position, and a bounded number of unprocessed bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from rollmill.errors import ConfigurationError, FatalError, PoisonRecordError
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.settings import ServiceSettings

KEEP_UP_SECONDS = 5.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


async def resolved(record: InputRecord, claim_check: ClaimCheck) -> InputRecord:
    """The record with the content of its blob, or with the reason why that cannot be read.

    The reference stays its value, so that a dead letter holds the record as received. Raises
    StorageUnreachableError.
    """
    try:
        content = await claim_check.resolve(record.value)
    except PoisonRecordError as error:
        return replace(record, resolved=error)
    return record if content is record.value else replace(record, resolved=content)


def uptime() -> float:
    """Seconds that no change of the wall clock moves, those in which the machine slept included."""
    return time.clock_gettime(_CLOCK)


class TaskConsumer:
    """Opened at a position, polled for bounded batches, closed; after a failure a new one is made."""

    def __init__(
        self, identity: TaskIdentity, clients: KafkaClients, settings: ServiceSettings, claim_check: ClaimCheck
    ) -> None:
        self._identity, self._settings, self._claim_check = identity, settings, claim_check
        self._topics = {partition: topic for topic, partition in identity.inputs}
        self._consumer: AIOKafkaConsumer = clients.consumer(group_id=identity.group_id)
        self._backlog: deque[ConsumerRecord] = deque()
        self._reached: dict[str, int] = {}
        self.caught_up = False
        """Whether the last poll left nothing unread, as far as is known."""
        self._watermarks: dict[str, int] = {}
        """High watermarks some seconds ago, and when the broker sent them."""
        self._watermarks_at = self._kept_up_at = -KEEP_UP_SECONDS

    async def open(self, offsets: Mapping[str, int] | None) -> dict[str, int]:
        """Seek to ``offsets`` by slot (None: the start of the log) and return the position in each partition.

        Raises FatalError where the log starts later, or where the group offset differs (rules T2, C3).
        """
        consumer, partitions = self._consumer, list(self._topics)
        await consumer.start()
        consumer.assign(partitions)
        starts = await consumer.beginning_offsets(partitions)
        if offsets is None:
            await self._refuse_foreign_offsets()
        for partition in partitions:
            position = (offsets or {}).get(self._identity.slot(partition), starts[partition])
            await self._check(partition, position, starts[partition])
            consumer.seek(partition, position)
            self._reached[self._identity.slot(partition)] = position
        return dict(self._reached)

    async def close(self) -> None:
        await stop_consumer(self._consumer)

    async def poll(self, max_records: int) -> list[ConsumerRecord]:
        """The next records, about ``poll_bytes`` of them; nothing is fetched while others wait here."""
        if not self._backlog:
            await self._fetch()
        batch: list[ConsumerRecord] = []
        size = 0
        while self._backlog and len(batch) < max_records and (not batch or size < self._settings.poll_bytes):
            batch.append(self._backlog.popleft())
            size += len(batch[-1].value or b"")
        return batch

    def reached(self) -> dict[str, int]:
        """Next offset by slot once all that was fetched is processed, transaction markers included.

        Empty while records wait: then only the records' own offsets count.
        """
        return {} if self._backlog else dict(self._reached)

    @property
    def keeps_up(self) -> bool:
        """Whether everything that was in the log a few seconds ago has been read."""
        return self._is_recent(self._kept_up_at)

    async def read(self, raw: ConsumerRecord) -> InputRecord:
        """As the stage gets it, with the content of its blob where it has one. Raises StorageUnreachableError."""
        topic = self._topics[TopicPartition(raw.topic, raw.partition)]
        record = InputRecord(topic, raw.partition, raw.offset, raw.key or b"", raw.value, tuple(raw.headers))
        return await resolved(record, self._claim_check)

    def slot(self, raw: ConsumerRecord) -> str:
        return self._identity.slot(TopicPartition(raw.topic, raw.partition))

    def topic_index(self, record: InputRecord) -> int:
        """Which of the stage's inputs a record came from, for the order of updates."""
        return list(dict.fromkeys(self._topics.values())).index(record.topic)

    def offsets(self, positions: Mapping[str, int]) -> dict[TopicPartition, int]:
        return {partition: positions[self._identity.slot(partition)] for partition in self._topics}

    def lag(self) -> dict[str, int]:
        """Records between position and high watermark by slot; the position counts polled records."""
        lags = {}
        for partition in self._topics:
            slot, high = self._identity.slot(partition), self._consumer.highwater(partition)
            if high is not None:
                lags[slot] = max(0, high - self._reached.get(slot, 0))
        return lags

    async def _fetch(self) -> None:
        async with asyncio.timeout(self._settings.deadline_seconds):
            found = await self._getmany()
            for records in found.values():
                self._backlog.extend(records)
            for partition in self._topics:
                self._reached[self._identity.slot(partition)] = await self._consumer.position(partition)
        self._update_progress(empty=not found)

    async def _getmany(self) -> Mapping[TopicPartition, list[ConsumerRecord]]:
        settings = self._settings
        try:
            found: Mapping[TopicPartition, list[ConsumerRecord]] = await self._consumer.getmany(
                timeout_ms=settings.poll_ms, max_records=settings.poll_records
            )
        except OffsetOutOfRangeError as error:
            raise FatalError(f"records were deleted before they were read: {error}") from error
        return found

    def _update_progress(self, *, empty: bool) -> None:
        """A busy partition never polls empty, so beside that the watermarks of a while ago are compared.

        An empty poll alone shows nothing: it is empty, too, where the broker is away.
        """
        watermarks = {self._identity.slot(p): self._consumer.highwater(p) or 0 for p in self._topics}
        answered_at = self._answered_at()
        if empty:
            self._kept_up_at = max(self._kept_up_at, answered_at)
        elif self._has_reached(self._watermarks):
            self._kept_up_at = self._watermarks_at
        if empty or not self._watermarks or self._has_reached(self._watermarks):
            self._watermarks, self._watermarks_at = watermarks, answered_at
        self.caught_up = (empty or self._has_reached(watermarks)) and self._is_recent(answered_at)

    def _answered_at(self) -> float:
        """When the broker last sent how far each partition is, by `uptime`."""
        answers = [self._consumer.last_poll_timestamp(partition) or 0 for partition in self._topics]
        return uptime() - max(0.0, time.time() - min(answers) / 1000)

    @staticmethod
    def _is_recent(at: float) -> bool:
        return uptime() - at < KEEP_UP_SECONDS

    def _has_reached(self, watermarks: Mapping[str, int]) -> bool:
        return bool(watermarks) and all(self._reached[slot] >= watermark for slot, watermark in watermarks.items())

    async def _check(self, partition: TopicPartition, position: int, start: int) -> None:
        where = f"{partition.topic}/{partition.partition}"
        if position < start:
            raise FatalError(
                f"the position in {where} is {position}, but the log starts at {start}: {start - position} records "
                "were deleted unread. Lengthen the retention; to go on without them, replay into another prefix"
            )
        stored = await self._consumer.committed(partition)
        if stored is not None and stored != position and not await self._committed_becomes(partition, position):
            raise FatalError(
                f"the changelog says position {position} in {where}, the group offset of {self._identity.group_id} "
                f"says {stored}. One of them was moved; set the group offset back to {position}"
            )

    async def _committed_becomes(self, partition: TopicPartition, position: int) -> bool:
        """Offsets of a transaction show a moment after its marker: look again for a while."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.deadline_seconds
        while loop.time() < until:
            if await self._consumer.committed(partition) == position:
                return True
            await asyncio.sleep(0.1)
        return False

    async def _refuse_foreign_offsets(self) -> None:
        stored = {self._identity.slot(p): await self._consumer.committed(p) for p in self._topics}
        foreign = {slot: offset for slot, offset in stored.items() if offset is not None}
        if foreign:
            raise ConfigurationError(
                f"group {self._identity.group_id} has offsets {foreign}, but the changelog "
                f"{self._identity.changelog.topic}/{self._identity.changelog.partition} has no position: it was "
                "deleted, or something else uses the group's name. Use another prefix"
            )
