"""Reading a changelog partition: whose it is, where the input stands, which deltas are live (RULES T2, G1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
from aiokafka import AIOKafkaConsumer, TopicPartition

from rollmill.kafka.clients import KafkaClients
from rollmill.models import dump_json

OWNER = "!owner"
POSITION = "!position"
POLL_MS = 200


@dataclass(frozen=True)
class Position:
    """The input position and the dead-letter level, as every transaction writes them down."""

    offsets: dict[str, int]
    """Next input offset by ``topic/partition``."""
    dead_letter_level: float = 0.0

    def encode(self) -> bytes:
        return dump_json({"offsets": self.offsets, "dead_letter_level": self.dead_letter_level})

    @classmethod
    def decode(cls, value: bytes) -> Position:
        data = orjson.loads(value)
        return cls(data["offsets"], data["dead_letter_level"])


@dataclass
class Tail:
    """What was found in a changelog partition from some offset on."""

    owner: str | None = None
    position: Position | None = None
    next_offset: int = 0
    live: dict[str, bytes] = field(default_factory=dict)

    def take(self, key: str, value: bytes | None, offset: int) -> None:
        self.next_offset = offset + 1
        if key == OWNER:
            self.owner = None if value is None else value.decode()
        elif key == POSITION:
            self.position = None if value is None else Position.decode(value)
        elif value is None:
            self.live.pop(key, None)
        else:
            self.live[key] = value


async def read_to_end(clients: KafkaClients, partition: TopicPartition, start: int | None) -> Tail:
    """Everything committed from ``start`` (None: the beginning) to the last stable offset."""
    return await _read(clients, partition, start, owner=None)


async def read_to_owner(clients: KafkaClients, partition: TopicPartition, start: int | None, owner: str) -> Tail:
    """Everything from ``start`` until this owner's own record comes back.

    End offsets are not trusted: under read_committed they are the last stable offset.
    """
    return await _read(clients, partition, start, owner=owner)


async def _read(clients: KafkaClients, partition: TopicPartition, start: int | None, owner: str | None) -> Tail:
    consumer = clients.consumer(reset="earliest")
    await consumer.start()
    try:
        consumer.assign([partition])
        if start is None:
            await consumer.seek_to_beginning(partition)
        else:
            consumer.seek(partition, start)
        return await _follow(consumer, partition, owner)
    finally:
        await consumer.stop()


async def _follow(consumer: AIOKafkaConsumer, partition: TopicPartition, owner: str | None) -> Tail:
    tail = Tail()
    end = (await consumer.end_offsets([partition]))[partition]
    while not await _finished(consumer, partition, tail, owner, end):
        for records in (await consumer.getmany(partition, timeout_ms=POLL_MS)).values():
            for record in records:
                tail.take(record.key.decode(), record.value, record.offset)
    return tail


async def _finished(
    consumer: AIOKafkaConsumer, partition: TopicPartition, tail: Tail, owner: str | None, end: int
) -> bool:
    if owner is not None:
        return tail.owner == owner
    return bool(await consumer.position(partition) >= end)
