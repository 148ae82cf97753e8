"""Offsets of the group on the broker: where each partition starts, and what is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from rollmill.errors import FatalError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill_evaluator.consumer.watermark import Mark, decode, encode

log = structlog.get_logger(__name__)


class Commits:
    """Reads and writes the commits of one group. Every call on the broker has a deadline."""

    def __init__(self, consumer: AIOKafkaConsumer, clients: KafkaClients, group: str, seconds: float) -> None:
        self._consumer, self._clients = consumer, clients
        self._group, self._seconds = group, seconds
        self._written: dict[TopicPartition, Mark] = {}

    async def starts(self, places: Collection[TopicPartition]) -> dict[TopicPartition, Mark]:
        """Where to start: at the commit, else at the beginning of the log.

        Raises FatalError where the commit lies before the log's start: records are gone unread (rule C3).
        """
        if not places:
            return {}
        async with asyncio.timeout(self._seconds):
            committed = await self._committed(places)
            beginnings = await self._consumer.beginning_offsets(list(places))
        for place, mark in committed.items():
            _refuse_a_gap(self._group, place, mark.offset, beginnings[place])
        self._written |= committed
        return {place: committed.get(place, Mark(beginnings[place])) for place in places}

    async def _committed(self, places: Collection[TopicPartition]) -> dict[TopicPartition, Mark]:
        """By the admin client: the consumer's own call drops the metadata."""
        admin = self._clients.admin()
        await admin.start()
        try:
            found = await admin.list_consumer_group_offsets(self._group, partitions=list(places))
        finally:
            await admin.close()
        return {place: decode(said.offset, said.metadata) for place, said in found.items() if said.offset >= 0}

    async def write(self, marks: Mapping[TopicPartition, Mark]) -> bool:
        """Commit what is new. False: it was refused, because the group has changed; nothing is lost by that."""
        new = {place: mark for place, mark in marks.items() if self._written.get(place) != mark}
        if not new:
            return True
        try:
            async with asyncio.timeout(self._seconds):
                await self._consumer.commit({place: (mark.offset, encode(mark)) for place, mark in new.items()})
        except (KafkaError, IllegalStateError, TimeoutError) as error:
            log.warning("commit refused", error=str(error), kind=type(error).__name__)
            return False
        self._written |= new
        return True

    def forget(self, places: Collection[TopicPartition]) -> None:
        """Partitions that belong to somebody else now."""
        for place in places:
            self._written.pop(place, None)


def _refuse_a_gap(group: str, place: TopicPartition, committed: int, beginning: int) -> None:
    if committed < beginning:
        raise FatalError(
            f"group {group} stands at offset {committed} of {place.topic}/{place.partition}, but the log begins at "
            f"{beginning}: {beginning - committed} records are gone unread. Their sessions end at the evaluation "
            "deadline; to go on, reset the group's offset to the log's beginning"
        )
