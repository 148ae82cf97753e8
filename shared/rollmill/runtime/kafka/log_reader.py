"""Reads topics to their end, committed records only, with one consumer for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeAlias

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import Topic

POLL_MS = 200

KafkaRecord: TypeAlias = "ConsumerRecord[bytes, bytes]"


@dataclass(frozen=True)
class Log:
    """The topics of one prefix."""

    settings: KafkaSettings
    consumer: AIOKafkaConsumer

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: KafkaSettings) -> AsyncIterator[Self]:
        async with KafkaClients(settings).reading(reset="earliest") as consumer:
            yield cls(settings, consumer)

    def partitions(self, topic: Topic) -> list[TopicPartition]:
        name = topic.full_name(self.settings.prefix)
        return [TopicPartition(name, number) for number in range(topic.partitions(self.settings))]

    async def read(
        self, topic: Topic, starts: Mapping[int, int] | None = None, *, only: int | None = None
    ) -> AsyncIterator[KafkaRecord]:
        """Records of all partitions, in order within each, up to the last stable offset as it is now.

        ``starts``: first offset by partition; one that is not named is read from its beginning. ``only``: one
        partition alone.
        """
        everywhere = self.partitions(topic)
        partitions = everywhere if only is None else [everywhere[only]]
        self.consumer.assign(partitions)
        await self.consumer.seek_to_beginning(*partitions)
        for number, offset in (starts or {}).items():
            self.consumer.seek(everywhere[number], offset)
        ends = await self.consumer.end_offsets(partitions)
        # An empty poll is progress, too: it moves the position past the markers of transactions.
        while not await self._past(ends):
            for records in (await self.consumer.getmany(timeout_ms=POLL_MS)).values():
                for record in records:
                    yield record

    async def beginnings(self, topic: Topic) -> dict[int, int]:
        """First retained offset, by partition."""
        found = await self.consumer.beginning_offsets(self.partitions(topic))
        return {partition.partition: offset for partition, offset in found.items()}

    async def at(self, topic: Topic, partition: int, offset: int) -> KafkaRecord:
        """The record at one offset. Raises LookupError where there is none."""
        target = self.partitions(topic)[partition]
        self.consumer.assign([target])
        self.consumer.seek(target, offset)
        end = (await self.consumer.end_offsets([target]))[target]
        while await self.consumer.position(target) < end:
            for record in (await self.consumer.getmany(timeout_ms=POLL_MS, max_records=1)).get(target, ()):
                if record.offset == offset:
                    return record
                raise LookupError(f"{target.topic}/{partition} has no record at offset {offset}")
        raise LookupError(f"{target.topic}/{partition} ends before offset {offset}")

    async def _past(self, ends: Mapping[TopicPartition, int]) -> bool:
        behind = [tp for tp, end in ends.items() if await self.consumer.position(tp) < end]
        return not behind

    async def positions(self) -> dict[int, int]:
        """Next offset by partition of the topic read last."""
        return {tp.partition: await self.consumer.position(tp) for tp in self.consumer.assignment()}
