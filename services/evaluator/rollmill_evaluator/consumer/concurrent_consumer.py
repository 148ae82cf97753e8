"""A member of a consumer group that handles the records of a topic concurrently, at least once (rule V1).

aiokafka rebalances eagerly and in the background: its callbacks run in a task of their own, always with all
partitions; fetching goes on before they return; and a retained partition loses its position. Hence three measures:
polling waits for the event `_assigned`, a poll that spans a rebalance is discarded (its `_generation` differs), and
every assignment seeks explicitly. Retained partitions keep their tracker and their running records; those of lost
partitions are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import IllegalStateError

from rollmill.runtime.app import ServiceContext
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import Topic
from rollmill_evaluator.consumer.in_flight import HandleRecord, RecordsInFlight, is_set_within
from rollmill_evaluator.consumer.offset_commits import OffsetCommits
from rollmill_evaluator.consumer.watermark import OffsetTracker

log = structlog.get_logger(__name__)

KEEPALIVE_POLL_SECONDS = 60.0
"""A member without capacity still polls this often, with all partitions paused: else the group would remove it."""


@dataclass(frozen=True)
class ConsumerLimits:
    """How much is in flight, and how often things happen."""

    records: int
    bytes: int
    """Polling stops above this; one poll can overshoot it."""
    poll_seconds: float
    commit_seconds: float
    drain_seconds: float
    deadline_seconds: float
    """For every call on the broker."""
    join_seconds: float
    """For joining, which waits until the session of a dead member has timed out."""


class ConcurrentConsumer:
    """Reads ``topic`` as a member of ``group_id`` and runs ``handle`` for each record.

    A record is finished when ``handle`` returns; its exceptions end the loop, so that no record is skipped.
    """

    def __init__(
        self,
        handle: HandleRecord,
        *,
        topic: Topic,
        prefix: str,
        group_id: str,
        clients: KafkaClients,
        limits: ConsumerLimits,
        metrics: Metrics,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """``labels``: of the metrics, where several groups run in one process: ``reads`` names this one."""
        self._limits, self._metrics = limits, metrics
        self._labels = {"reads": topic.name, **(labels or {})}
        self._group_id = group_id
        self._topic, self._topic_name = topic, topic.full_name(prefix)
        self._consumer: AIOKafkaConsumer = clients.consumer(group_id=group_id, reset="earliest")
        self._commits = OffsetCommits(self._consumer, clients, group_id, limits.deadline_seconds)
        self._in_flight = RecordsInFlight(
            handle, max_records=limits.records, max_bytes=limits.bytes, metrics=metrics, labels=self._labels
        )
        self._trackers: dict[TopicPartition, OffsetTracker] = {}
        self._assigned = asyncio.Event()
        self._generation = 0
        self._must_seek = False
        self._polled_at = self._committed_at = time.monotonic()
        self.joined = asyncio.Event()
        """Set once partitions have been assigned (it may be none of them)."""

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``; then wait for running records, commit and leave. Raises what ``handle`` raised."""
        self._consumer.subscribe([self._topic_name], listener=_RebalanceListener(self, self._in_flight.fail))
        async with asyncio.timeout(self._limits.join_seconds):
            await self._consumer.start()
        try:
            while not stop.is_set():
                await self._poll_once()
            await self._drain()
        finally:
            await self._leave()

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions that are assigned to this member now."""
        return frozenset(self._trackers)

    # ---- the loop ------------------------------------------------------------------------------------------------

    async def _poll_once(self) -> None:
        if not await is_set_within(self._limits.poll_seconds, self._assigned):
            self._in_flight.raise_failure()
            return
        self._seek_if_discarded()
        if self._in_flight.has_capacity():
            await self._start_polled()
        elif not await self._in_flight.wait_for_capacity(self._limits.poll_seconds):
            await self._poll_to_stay_member()
        self._in_flight.raise_failure()
        if time.monotonic() - self._committed_at >= self._limits.commit_seconds:
            await self._advance_trackers()
            await self._commit()

    async def _start_polled(self) -> None:
        generation = self._generation
        polled = await self._consumer.getmany(
            timeout_ms=int(self._limits.poll_seconds * 1000), max_records=self._in_flight.free_records
        )
        self._polled_at = time.monotonic()
        if generation != self._generation:
            self._must_seek = True
            return
        for topic_partition, records in polled.items():
            for record in records:
                self._in_flight.start(topic_partition, record, self._trackers[topic_partition])

    def _seek_if_discarded(self) -> None:
        """A rebalance during the last poll made its records void: read them again, if the partition is still ours."""
        if not self._must_seek:
            return
        self._must_seek = False
        with suppress(IllegalStateError):  # the next rebalance is under way already: it seeks, too
            for topic_partition, tracker in self._trackers.items():
                self._consumer.seek(topic_partition, tracker.position)

    async def _advance_trackers(self) -> None:
        """Pass transaction markers: each has an offset and no record, so only the consumer's position shows it."""
        generation = self._generation
        for topic_partition, tracker in list(self._trackers.items()):
            with suppress(IllegalStateError, TimeoutError):
                position = await asyncio.wait_for(
                    self._consumer.position(topic_partition), self._limits.deadline_seconds
                )
                if generation != self._generation or self._must_seek:
                    return
                tracker.advance_to(position)
                lag = max(0, (self._consumer.highwater(topic_partition) or position) - position)
                self._metrics.gauge("evaluator_lag_records", lag, **self._lag_labels(topic_partition))

    def _lag_labels(self, topic_partition: TopicPartition) -> dict[str, str]:
        return {**self._labels, "topic": self._topic.name, "partition": str(topic_partition.partition)}

    async def _poll_to_stay_member(self) -> None:
        if time.monotonic() - self._polled_at < KEEPALIVE_POLL_SECONDS:
            return
        everything = self._consumer.assignment()
        self._consumer.pause(*everything)
        await self._consumer.getmany(timeout_ms=0)
        self._consumer.resume(*(everything & self._consumer.assignment()))
        self._polled_at = time.monotonic()

    # ---- rebalances ----------------------------------------------------------------------------------------------

    async def on_revoked(self) -> None:
        """All partitions may be lost: commit what is finished while they are still ours."""
        self._assigned.clear()
        self._generation += 1
        if self._trackers:
            await self._commit()

    async def on_assigned(self, topic_partitions: Collection[TopicPartition]) -> None:
        """Continue retained partitions where they were, cancel what runs on lost ones, start new ones."""
        kept = set(topic_partitions)
        self._forget(set(self._trackers) - kept)
        starts = await self._commits.starting_points(kept - set(self._trackers))
        self._trackers |= {item: OffsetTracker(watermark) for item, watermark in starts.items()}
        for topic_partition in kept:
            self._consumer.seek(topic_partition, self._trackers[topic_partition].position)
        self._metrics.gauge("partitions_assigned", len(kept), **self._labels)
        self._metrics.count("rebalances", 1, **self._labels)
        log.info(
            "partitions assigned",
            group=self._group_id,
            partitions=sorted(item.partition for item in kept),
            new=len(starts),
        )
        self._assigned.set()
        self.joined.set()

    def _forget(self, lost: Collection[TopicPartition]) -> None:
        self._in_flight.cancel(lost)
        for topic_partition in lost:
            del self._trackers[topic_partition]
            self._metrics.forget("evaluator_lag_records", **self._lag_labels(topic_partition))
        self._commits.forget(lost)

    async def _commit(self) -> None:
        self._committed_at = time.monotonic()
        watermarks = {item: tracker.watermark() for item, tracker in self._trackers.items()}
        if not await self._commits.commit(watermarks):
            self._metrics.count("commits_refused", 1, **self._labels)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let running records finish for a while; the next owner repeats those that do not."""
        await self._in_flight.drain(self._limits.drain_seconds)
        self._in_flight.raise_failure()
        await self._commit()

    async def _leave(self) -> None:
        await self._in_flight.cancel_all(self._limits.deadline_seconds)
        await stop_consumer(self._consumer)


class _RebalanceListener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka only logs what a callback raises: here ``fail`` gets it, which ends the loop."""

    def __init__(self, consumer: ConcurrentConsumer, fail: Callable[[BaseException], None]) -> None:
        self._consumer, self._fail = consumer, fail

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:  # noqa: ARG002  # always all
        try:
            await self._consumer.on_revoked()
        except Exception as error:  # noqa: BLE001  # handed on to the loop
            self._fail(error)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        try:
            await self._consumer.on_assigned(assigned)
        except Exception as error:  # noqa: BLE001  # handed on to the loop
            self._fail(error)


async def run_member(consumer: ConcurrentConsumer, context: ServiceContext, part: str) -> None:
    """Run ``consumer`` until ``context.stop``; the service's health lists it as ``part``, ready while it is joined."""
    context.health.expect(part)
    announcing = asyncio.create_task(_announce(consumer, context, part))
    try:
        await consumer.run(context.stop)
    finally:
        announcing.cancel()
        context.health.ready(part, ready=False)


async def _announce(consumer: ConcurrentConsumer, context: ServiceContext, part: str) -> None:
    await consumer.joined.wait()
    context.health.ready(part)
