"""Reads a changelog partition: who owns the task, its input position, which updates are live (rules T2, G1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.models import dump_json
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.stream.task_stop import NOTES

OWNER = "!owner"
POSITION = "!position"
META = b"!"
"""No state key begins like this."""
POLL_MS = 200
READ_AT_ONCE = 1000
"""Records between two turns of the event loop: some 10 ms (rule C5)."""


@dataclass(frozen=True)
class Position:
    """The input position and the dead-letter budget, as every transaction writes them to the changelog."""

    offsets: dict[str, int]
    """Next input offset by ``topic/partition``."""
    dead_letter_level: float = 0.0
    dead_letter_keys: tuple[str, ...] = ()
    """Of the keys that the level counts, hashed; absent on the wire where there are none."""

    def encode(self) -> bytes:
        keys = {"dead_letter_keys": self.dead_letter_keys} if self.dead_letter_keys else {}
        return dump_json({"offsets": self.offsets, "dead_letter_level": self.dead_letter_level, **keys})

    @classmethod
    def decode(cls, value: bytes) -> Position:
        data = orjson.loads(value)
        return cls(data["offsets"], data["dead_letter_level"], tuple(data.get("dead_letter_keys", ())))


@dataclass
class ChangelogScan:
    """What was found in a changelog partition from some offset on."""

    owners: list[str] = field(default_factory=list)
    """Every owner record, in order: ``<process>.<epoch>``."""
    position: Position | None = None
    next_offset: int = 0
    notes: dict[str, bytes | None] = field(default_factory=dict)
    """Why the task stopped, and what was decided: the newest record of each, undecoded."""
    live: dict[bytes, bytes] = field(default_factory=dict)
    """Payloads by changelog key, both undecoded: most of what is read is superseded later."""

    def add(self, record: ConsumerRecord[bytes, bytes]) -> None:
        key, value = record.key, record.value
        self.next_offset = record.offset + 1
        if key[:1] == META:
            self._add_meta(key.decode(), value)
        elif value is None:
            self.live.pop(key, None)
        else:
            self.live[key] = value

    def _add_meta(self, key: str, value: bytes | None) -> None:
        if key == OWNER and value is not None:
            self.owners.append(value.decode())
        elif key == POSITION:
            self.position = None if value is None else Position.decode(value)
        elif key in NOTES:
            self.notes[key] = value


class ChangelogReader:
    """Reads one changelog partition, committed records only.

    ``deadline_seconds``: a read raises TimeoutError after so long without a record. Every new record starts the time
    again, so a long log may take longer in total.
    """

    def __init__(self, clients: KafkaClients, partition: TopicPartition, deadline_seconds: float) -> None:
        self._clients, self._partition, self._deadline = clients, partition, deadline_seconds

    async def end(self) -> int:
        """The last stable offset."""
        async with asyncio.timeout(self._deadline), self._consumer() as consumer:
            return await self._end(consumer)

    async def to_end(self, start: int) -> ChangelogScan:
        """Everything from ``start`` to the last stable offset."""
        scan = ChangelogScan(next_offset=start)
        async with asyncio.timeout(self._deadline) as limit, self._consumer() as consumer:
            consumer.seek(self._partition, start)
            end = await self._end(consumer)
            while await consumer.position(self._partition) < end:
                await self._read(consumer, scan, limit)
        return scan

    async def to_owner(self, start: int | None, owner: str) -> ChangelogScan:
        """Everything from ``start`` (None: the beginning) until the record of ``owner`` is read.

        End offsets are not trusted: under read_committed they are the last stable offset.
        """
        scan = ChangelogScan()
        async with asyncio.timeout(self._deadline) as limit, self._consumer() as consumer:
            if start is None:
                await consumer.seek_to_beginning(self._partition)
            else:
                consumer.seek(self._partition, start)
            while not scan.owners or scan.owners[-1] != owner:
                await self._read(consumer, scan, limit)
        return scan

    async def _read(self, consumer: AIOKafkaConsumer, scan: ChangelogScan, limit: asyncio.Timeout) -> None:
        found = await consumer.getmany(self._partition, timeout_ms=POLL_MS, max_records=READ_AT_ONCE)
        for records in found.values():
            for record in records:
                scan.add(record)
            limit.reschedule(asyncio.get_running_loop().time() + self._deadline)
            await asyncio.sleep(0)

    async def _end(self, consumer: AIOKafkaConsumer) -> int:
        return int((await consumer.end_offsets([self._partition]))[self._partition])

    @asynccontextmanager
    async def _consumer(self) -> AsyncIterator[AIOKafkaConsumer]:
        async with self._clients.reading(reset="earliest") as consumer:
            consumer.assign([self._partition])
            yield consumer
