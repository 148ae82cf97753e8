"""The committed offsets of a consumer group on the broker: where each partition starts, and what was committed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from rollmill.errors import FatalError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill_evaluator.consumer.watermark import Watermark, decode, encode

log = structlog.get_logger(__name__)


class OffsetCommits:
    """Reads and writes the commits of one group. Every call on the broker has a deadline of ``seconds``."""

    def __init__(self, consumer: AIOKafkaConsumer, clients: KafkaClients, group: str, seconds: float) -> None:
        self._consumer, self._clients = consumer, clients
        self._group, self._seconds = group, seconds
        self._written: dict[TopicPartition, Watermark] = {}

    async def starting_points(self, topic_partitions: Collection[TopicPartition]) -> dict[TopicPartition, Watermark]:
        """The committed watermark of each partition, or the beginning of its log where none is committed.

        Raises FatalError where the commit is below the log's beginning: records were deleted unread (rule C3).
        """
        if not topic_partitions:
            return {}
        async with asyncio.timeout(self._seconds):
            committed = await self._committed(topic_partitions)
            beginnings = await self._consumer.beginning_offsets(list(topic_partitions))
        for item, watermark in committed.items():
            _refuse_a_gap(self._group, item, watermark.offset, beginnings[item])
        self._written |= committed
        return {item: committed.get(item, Watermark(beginnings[item])) for item in topic_partitions}

    async def _committed(self, topic_partitions: Collection[TopicPartition]) -> dict[TopicPartition, Watermark]:
        """By the admin client: the consumer's own call drops the metadata."""
        admin = self._clients.admin()
        await admin.start()
        try:
            found = await admin.list_consumer_group_offsets(self._group, partitions=list(topic_partitions))
        finally:
            await admin.close()
        return {item: decode(commit.offset, commit.metadata) for item, commit in found.items() if commit.offset >= 0}

    async def commit(self, watermarks: Mapping[TopicPartition, Watermark]) -> bool:
        """Commit what is new. False: the group has changed and the broker refused; nothing is lost by that."""
        new = {item: watermark for item, watermark in watermarks.items() if self._written.get(item) != watermark}
        if not new:
            return True
        offsets = {item: (watermark.offset, encode(watermark)) for item, watermark in new.items()}
        try:
            async with asyncio.timeout(self._seconds):
                await self._consumer.commit(offsets)
        except (KafkaError, IllegalStateError, TimeoutError) as error:
            log.warning(
                "commit refused; what is not committed is repeated by the next owner of the partitions",
                group=self._group,
                error=str(error),
                kind=type(error).__name__,
            )
            return False
        self._written |= new
        return True

    def forget(self, topic_partitions: Collection[TopicPartition]) -> None:
        """Drop what is known of partitions that other members own now."""
        for item in topic_partitions:
            self._written.pop(item, None)


def _refuse_a_gap(group: str, topic_partition: TopicPartition, committed: int, beginning: int) -> None:
    if committed < beginning:
        raise FatalError(
            f"group {group} committed offset {committed} of {topic_partition.topic}/{topic_partition.partition}, but "
            f"the log begins at {beginning}: {beginning - committed} records were deleted unread. Their sessions end "
            "at the evaluation deadline; to continue, reset the group's offset to the log's beginning"
        )
