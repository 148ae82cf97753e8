"""The polling loop of a dynamic group that handles records concurrently, at least once (rule V1).

aiokafka rebalances eagerly and in the background: its callbacks run in a task of their own, always with all
partitions, fetching goes on before they return, and a retained partition loses its position. Hence the gate, the
generation and the explicit seek. Positions and running tasks of retained partitions stay; those of lost ones end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError

from rollmill.codec import Headers
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import Topic
from rollmill_evaluator.consumer.commits import Commits
from rollmill_evaluator.consumer.watermark import Progress

log = structlog.get_logger(__name__)

SIGN_OF_LIFE_SECONDS = 60.0
"""A full house still polls so often (with everything paused), or the group would think it dead."""


@dataclass(frozen=True)
class Received:
    """A record as it was read."""

    partition: int
    offset: int
    value: bytes | None
    headers: Headers

    @property
    def size(self) -> int:
        return len(self.value or b"")


Handle = Callable[[Received], Awaitable[None]]


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
    """For joining, which waits until the session of a member that died has ended."""


class ConcurrentConsumer:
    """Reads ``topic`` as a member of ``group_id`` and runs ``handle`` for each record.

    A record is finished when ``handle`` returns; its exceptions end the loop, so that nothing is passed over.
    """

    def __init__(
        self,
        handle: Handle,
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
        self._handle, self._limits, self._metrics = handle, limits, metrics
        self._labels = {"reads": topic.name, **(labels or {})}
        self._group_id = group_id
        self._topic, self._topic_name = topic, topic.full_name(prefix)
        self._consumer: AIOKafkaConsumer = clients.consumer(group_id=group_id, reset="earliest")
        self._commits = Commits(self._consumer, clients, group_id, limits.deadline_seconds)
        self._progress: dict[TopicPartition, Progress] = {}
        self._tasks: dict[asyncio.Task[None], TopicPartition] = {}
        self._bytes = 0
        self._gate, self._freed = asyncio.Event(), asyncio.Event()
        self._generation = 0
        self._stale = False
        self._failure: BaseException | None = None
        self._polled_at = self._committed_at = time.monotonic()
        self.joined = asyncio.Event()
        """Set once partitions have been assigned (it may be none of them)."""

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``; then wait for what is running, commit and leave. Raises what ``handle`` raised."""
        self._consumer.subscribe([self._topic_name], listener=_Listener(self))
        async with asyncio.timeout(self._limits.join_seconds):
            await self._consumer.start()
        try:
            while not stop.is_set():
                await self._turn()
            await self._drain()
        finally:
            await self._leave()

    @property
    def places(self) -> frozenset[TopicPartition]:
        """The partitions that are this member's now."""
        return frozenset(self._progress)

    # ---- the loop ------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        if not await _within(self._limits.poll_seconds, self._gate):
            self._raise_failure()
            return
        self._read_again()
        if self._has_room():
            await self._take()
        elif not await _within(self._limits.poll_seconds, self._freed):
            await self._show_life()
        self._raise_failure()
        if time.monotonic() - self._committed_at >= self._limits.commit_seconds:
            await self._pass_markers()
            await self._commit()

    def _has_room(self) -> bool:
        room = len(self._tasks) < self._limits.records and self._bytes < self._limits.bytes
        if not room:
            self._freed.clear()
        return room

    async def _take(self) -> None:
        generation = self._generation
        polled = await self._consumer.getmany(
            timeout_ms=int(self._limits.poll_seconds * 1000), max_records=self._limits.records - len(self._tasks)
        )
        self._polled_at = time.monotonic()
        if generation != self._generation:
            self._stale = True
            return
        for place, records in polled.items():
            for record in records:
                self._begin(place, record)

    def _read_again(self) -> None:
        """Partitions changed hands during the last poll: what came is dropped, and read again by whoever has them."""
        if not self._stale:
            return
        self._stale = False
        with suppress(IllegalStateError):  # the next rebalance is under way already: it seeks, too
            for place, progress in self._progress.items():
                self._consumer.seek(place, progress.position)

    async def _pass_markers(self) -> None:
        """A transaction's marker has an offset and no record: only the consumer's position shows that it is passed."""
        generation = self._generation
        for place, progress in list(self._progress.items()):
            with suppress(IllegalStateError, TimeoutError):
                position = await asyncio.wait_for(self._consumer.position(place), self._limits.deadline_seconds)
                if generation != self._generation or self._stale:
                    return
                progress.pass_to(position)
                lag = max(0, (self._consumer.highwater(place) or position) - position)
                self._metrics.gauge("evaluator_lag_records", lag, **self._place_labels(place))

    def _place_labels(self, place: TopicPartition) -> dict[str, str]:
        return {**self._labels, "topic": self._topic.name, "partition": str(place.partition)}

    async def _show_life(self) -> None:
        if time.monotonic() - self._polled_at < SIGN_OF_LIFE_SECONDS:
            return
        everything = self._consumer.assignment()
        self._consumer.pause(*everything)
        await self._consumer.getmany(timeout_ms=0)
        self._consumer.resume(*(everything & self._consumer.assignment()))
        self._polled_at = time.monotonic()

    # ---- one record ----------------------------------------------------------------------------------------------

    def _begin(self, place: TopicPartition, record: ConsumerRecord[bytes, bytes]) -> None:
        progress = self._progress[place]
        if not progress.begin(record.offset):
            self._metrics.count("repeated_records", 1, **self._labels)
            return
        received = Received(place.partition, record.offset, record.value, tuple(record.headers))
        self._bytes += received.size
        task = asyncio.create_task(self._handle_one(received, progress), name=f"{place.partition}/{record.offset}")
        self._tasks[task] = place
        task.add_done_callback(self._ended)
        self._metrics.gauge("records_in_flight", len(self._tasks), **self._labels)

    async def _handle_one(self, received: Received, progress: Progress) -> None:
        try:
            await self._handle(received)
            progress.finish(received.offset)
            self._metrics.count("evaluator_records", 1, **self._labels)
        finally:
            self._bytes -= received.size

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._freed.set()
        self._metrics.gauge("records_in_flight", len(self._tasks), **self._labels)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def fail(self, error: BaseException | None) -> None:
        """End the loop with ``error``."""
        self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- partitions come and go ----------------------------------------------------------------------------------

    async def revoked(self) -> None:
        """All partitions are in doubt: commit what is finished while it is still ours."""
        self._gate.clear()
        self._generation += 1
        if self._progress:
            await self._commit()

    async def assigned(self, places: Collection[TopicPartition]) -> None:
        """Go on with retained partitions where they were, end what is lost, start what is new."""
        kept = set(places)
        self._drop(set(self._progress) - kept)
        starts = await self._commits.starts(kept - set(self._progress))
        self._progress |= {place: Progress(mark) for place, mark in starts.items()}
        for place in kept:
            self._consumer.seek(place, self._progress[place].position)
        self._metrics.gauge("partitions_assigned", len(kept), **self._labels)
        self._metrics.count("rebalances", 1, **self._labels)
        log.info(
            "partitions assigned",
            group=self._group_id,
            partitions=sorted(place.partition for place in kept),
            new=len(starts),
        )
        self._gate.set()
        self.joined.set()

    def _drop(self, lost: Collection[TopicPartition]) -> None:
        for task, place in self._tasks.items():
            if place in lost:
                task.cancel()
        for place in lost:
            del self._progress[place]
            self._metrics.forget("evaluator_lag_records", **self._place_labels(place))
        self._commits.forget(lost)

    async def _commit(self) -> None:
        self._committed_at = time.monotonic()
        written = await self._commits.write({place: progress.mark() for place, progress in self._progress.items()})
        if not written:
            self._metrics.count("commits_refused", 1, **self._labels)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let what is running finish for a while; what does not is repeated by the next member."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=self._limits.drain_seconds)
        self._raise_failure()
        await self._commit()

    async def _leave(self) -> None:
        running = list(self._tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=self._limits.deadline_seconds)
        await stop_consumer(self._consumer)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka only logs what a callback raises: here it ends the loop."""

    def __init__(self, group: ConcurrentConsumer) -> None:
        self._group = group

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:  # noqa: ARG002  # always all
        try:
            await self._group.revoked()
        except Exception as error:  # noqa: BLE001  # handed on to the loop
            self._group.fail(error)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        try:
            await self._group.assigned(assigned)
        except Exception as error:  # noqa: BLE001  # handed on to the loop
            self._group.fail(error)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """True once ``event`` is set, False if that takes longer than ``seconds``."""
    if event.is_set():
        return True
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
