"""The evaluator against Apache Kafka: never blocked, resumed where it was, partitions handed over without loss."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete

from rollmill.codec import decode, encode
from rollmill.errors import FatalError
from rollmill.models import EvalResult, Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients, faststream_broker
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import (
    BaseTrajectoryEvaluator,
    EvaluationContext,
    ResourceClass,
    StrategyRegistry,
    evaluator_registry,
)
from rollmill.topics import BUILT, EVALUATIONS, partition_of
from rollmill_evaluator.consumer.concurrent_consumer import ConcurrentConsumer
from rollmill_evaluator.consumer.watermark import Watermark
from rollmill_evaluator.consumer.watermark import decode as mark_of
from rollmill_evaluator.delivery.record_handler import RecordHandler
from rollmill_evaluator.grading import Grader
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import group_id, work

pytestmark = pytest.mark.kafka

WAIT = 40.0
PARTITIONS = 4


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> EvaluatorSettings:
    made = EvaluatorSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=PARTITIONS,
        commit_seconds=0.05,
    )
    await apply_topics(made, [BUILT, EVALUATIONS])
    return made


@dataclass
class Gates:
    """Holds evaluations of named sessions until they are let through, and counts all that begin or are cancelled."""

    held: dict[str, asyncio.Event] = field(default_factory=dict)
    began: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def hold(self, *session_ids: str) -> None:
        self.held |= {session_id: asyncio.Event() for session_id in session_ids}

    async def until_begun(self, *session_ids: str, times: int = 1) -> None:
        async with self.changed, asyncio.timeout(WAIT):
            await self.changed.wait_for(lambda: all(self.began[session_id] >= times for session_id in session_ids))

    async def until_total(self, count: int) -> None:
        """Wait until evaluations have begun ``count`` times; more is an error."""
        async with self.changed, asyncio.timeout(WAIT):
            await self.changed.wait_for(lambda: self.began.total() >= count)
        assert self.began.total() == count

    async def passed(self, session_id: str) -> None:
        async with self.changed:
            self.began[session_id] += 1
            self.changed.notify_all()
        try:
            if session_id in self.held:
                await self.held[session_id].wait()
        except asyncio.CancelledError:
            self.cancelled[session_id] += 1
            raise


def gated(gates: Gates) -> StrategyRegistry[BaseTrajectoryEvaluator]:
    class Gated(BaseTrajectoryEvaluator):
        async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # the base's signature
            await gates.passed(trajectory.session_id)
            return EvalResult(outcome_reward=0.5)

    return StrategyRegistry("evaluator", BaseTrajectoryEvaluator, {"gated": Gated})  # type: ignore[type-abstract]  # only for subclass checks


@dataclass
class Member:
    group: ConcurrentConsumer
    running: asyncio.Task[None]
    stop: asyncio.Event
    metrics: Metrics

    async def drain(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.running, WAIT)

    async def crash(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])

    def partitions(self) -> float:
        return self.metrics.registry.get_sample_value("rollmill_partitions_assigned", {"reads": "built"}) or 0.0


@asynccontextmanager
async def member(settings: EvaluatorSettings, gates: Gates) -> AsyncIterator[Member]:
    clients, metrics, stop = KafkaClients(settings), Metrics("evaluator"), asyncio.Event()
    topic = EVALUATIONS.full_name(settings.prefix)
    async with clients.producer() as producer:

        async def publish(session_id: str, value: bytes) -> None:
            await producer.send_and_wait(topic, value, session_id.encode())

        handler = RecordHandler(
            Grader(gated(gates), settings.limits, SystemClock()), publish, metrics, PARTITIONS, concurrency=100
        )
        group = ConcurrentConsumer(
            handler.handle,
            topic=BUILT,
            prefix=settings.prefix,
            group_id=group_id(settings.prefix, ResourceClass.LIGHT),
            clients=clients,
            limits=settings.group_limits,
            metrics=metrics,
        )
        made = Member(group, asyncio.create_task(group.run(stop)), stop, metrics)
        try:
            yield made
        finally:
            await made.crash()


def names(count: int, *, partition: int | None = None) -> list[str]:
    """Session ids, all of one partition if asked."""
    candidates = (f"s{number}" for number in range(10_000))
    fitting = (name for name in candidates if partition in (None, partition_of(name.encode(), PARTITIONS)))
    return [name for name, _ in zip(fitting, range(count), strict=False)]


def built(session_id: str, *strategies: str) -> Trajectory:
    specs = tuple(EvaluatorSpec(strategy=strategy) for strategy in strategies or ("gated",))
    return Trajectory(session_id=session_id, status=SessionStatus.COMPLETED, spec=SessionSpec(evaluators=specs))


async def build(settings: EvaluatorSettings, trajectories: Sequence[Trajectory]) -> None:
    """Produce as the builder does, in transactions: their markers leave gaps between offsets."""
    topic = BUILT.full_name(settings.prefix)
    async with KafkaClients(settings).producer(f"{settings.prefix}builder") as producer:
        for trajectory in trajectories:
            async with producer.transaction():
                await producer.send_and_wait(topic, encode(trajectory), trajectory.session_id.encode())


async def evaluations(settings: EvaluatorSettings, count: int) -> list[Evaluation]:
    """The first ``count`` evaluations, and whatever came with them; each lies where its session belongs."""
    topic = EVALUATIONS.full_name(settings.prefix)
    found: list[Evaluation] = []
    async with KafkaClients(settings).reading(reset="earliest") as consumer, asyncio.timeout(WAIT):
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        while len(found) < count:
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                said = [decode(Evaluation, record.value, tuple(record.headers)) for record in records]
                assert {partition_of(item.session_id.encode(), PARTITIONS) for item in said} == {place.partition}
                found += said
    return found


async def all_evaluations(settings: EvaluatorSettings) -> list[Evaluation]:
    topic = EVALUATIONS.full_name(settings.prefix)
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
    return await evaluations(settings, sum(ends.values()))


async def committed(settings: EvaluatorSettings) -> dict[int, Watermark]:
    admin = KafkaClients(settings).admin()
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group_id(settings.prefix, ResourceClass.LIGHT))
    finally:
        await admin.close()
    return {place.partition: mark_of(said.offset, said.metadata) for place, said in found.items()}


async def until_committed(settings: EvaluatorSettings, partition: int, mark: Watermark) -> None:
    """Wait for a commit, which is the only event that tells of itself."""
    async with asyncio.timeout(WAIT):
        while (await committed(settings)).get(partition) != mark:
            continue


async def ends(settings: EvaluatorSettings) -> dict[int, int]:
    places = [TopicPartition(BUILT.full_name(settings.prefix), number) for number in range(PARTITIONS)]
    async with KafkaClients(settings).reading() as consumer:
        consumer.assign(places)
        return {place.partition: offset for place, offset in (await consumer.end_offsets(places)).items()}


@asynccontextmanager
async def working(settings: EvaluatorSettings) -> AsyncIterator[ServiceContext]:
    """The evaluator's worker as it runs in its process; drained at the end."""
    context = ServiceContext(
        settings=settings,
        clients=KafkaClients(settings),
        broker=faststream_broker(settings),
        clock=SystemClock(),
        stop=asyncio.Event(),
        metrics=Metrics("evaluator"),
        health=Health(),
    )
    await context.broker.start()
    running = asyncio.create_task(work(context))
    try:
        yield context
    finally:
        context.stop.set()
        await asyncio.wait_for(running, WAIT)
        await context.broker.stop()


async def test_the_service_answers_every_session_and_commits_to_the_end(settings: EvaluatorSettings) -> None:
    sessions = names(12)
    await build(settings, [built(name, "session_completed", "reported") for name in sessions])
    async with working(settings) as context:
        said = await evaluations(settings, 24)
        assert context.health.readiness()[0] == 200
        await until_committed(settings, 0, Watermark((await ends(settings))[0]))
    assert {(item.session_id, item.outcome_reward, item.not_graded) for item in said} == {
        found for name in sessions for found in ((name, 1.0, None), (name, None, "not_reported"))
    }
    assert len({item.evaluation_id for item in said}) == 24
    assert {number: mark.offset for number, mark in (await committed(settings)).items()} == await ends(settings)


class Hangs(BaseTrajectoryEvaluator):
    """Never answers by itself."""

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # the base's signature
        await asyncio.Event().wait()
        return EvalResult()


async def test_a_class_that_takes_no_more_starves_no_other(settings: EvaluatorSettings) -> None:
    """In one process: more hanging evaluations than there is room for, and every session's quick one is said."""
    evaluator_registry().register("hangs", Hangs)
    tight = settings.model_copy(update={"evaluator_records": 2, "evaluator_concurrency": 2, "drain_seconds": 2.0})
    sessions = names(12)
    await build(tight, [built(name, "hangs", "session_completed") for name in sessions])
    async with working(tight):
        said = await evaluations(tight, 12)
        for number, end in (await ends(tight)).items():
            await until_committed(tight, number, Watermark(end))
    assert {item.session_id for item in said} == set(sessions)
    assert {item.evaluator for item in said} == {"session_completed"}


# B099, B100: polling goes on beside the slow one; only what is finished is committed
async def test_a_slow_session_blocks_no_other_and_a_crash_repeats_only_what_was_running(
    settings: EvaluatorSettings,
) -> None:
    slow, *quick = names(8, partition=1)
    gates = Gates()
    gates.hold(slow)
    await build(settings, [built(name) for name in (slow, *quick)])
    async with member(settings, gates) as first:
        assert {item.session_id for item in await evaluations(settings, 7)} == set(quick)
        # Eight records of one transaction each: offsets 0, 2, … 14, and the last marker at 15.
        await until_committed(settings, 1, Watermark(0, ((1, 16),)))
        await first.crash()
    assert gates.cancelled == {slow: 1}
    gates.held[slow].set()
    async with member(settings, gates) as second:
        await evaluations(settings, 8)
        await until_committed(settings, 1, Watermark(16))
        await second.drain()
    assert gates.began == {slow: 2} | dict.fromkeys(quick, 1)
    assert len({item.evaluation_id for item in await all_evaluations(settings)}) == 8


async def test_a_clean_stop_waits_for_what_is_running_and_repeats_nothing(settings: EvaluatorSettings) -> None:
    gates, sessions = Gates(), names(6)
    gates.hold(*sessions)
    await build(settings, [built(name) for name in sessions])
    async with member(settings, gates) as first:
        await gates.until_begun(*sessions)
        draining = asyncio.create_task(first.drain())
        for gate in gates.held.values():
            gate.set()
        await draining
    late = [name for name in names(9) if name not in sessions]
    await build(settings, [built(name) for name in late])
    async with member(settings, gates) as second:
        await evaluations(settings, 9)
        await second.drain()
    assert gates.began == dict.fromkeys([*sessions, *late], 1)
    assert len(await all_evaluations(settings)) == 9


# B101: each partition at its own offset, also when some are given up
async def test_a_second_member_takes_over_partitions_and_nothing_is_lost_or_doubled(
    settings: EvaluatorSettings,
) -> None:
    """What runs on a retained partition goes on; what ran on a lost one is cancelled and run by the new owner."""
    gates, sessions = Gates(), names(40)
    gates.hold(*sessions)
    await build(settings, [built(name) for name in sessions])
    async with member(settings, gates) as first:
        await gates.until_begun(*sessions)
        async with member(settings, gates) as second:
            await asyncio.wait_for(second.group.joined.wait(), WAIT)
            taken = {place.partition for place in second.group.partitions}
            moved = [name for name in sessions if partition_of(name.encode(), PARTITIONS) in taken]
            kept = [name for name in sessions if name not in moved]
            assert moved
            assert kept
            await gates.until_begun(*moved, times=2)
            assert first.partitions() + second.partitions() == PARTITIONS
            assert gates.cancelled == dict.fromkeys(moved, 1)
            for gate in gates.held.values():
                gate.set()
            await evaluations(settings, 40)
            later = [name for name in names(60) if name not in sessions]
            await build(settings, [built(name) for name in later])
            await evaluations(settings, 60)
            await second.drain()
            await first.drain()
    assert gates.began == dict.fromkeys(moved, 2) | dict.fromkeys([*kept, *later], 1)
    assert Counter(item.session_id for item in await all_evaluations(settings)) == dict.fromkeys([*sessions, *later], 1)
    assert {number: mark.offset for number, mark in (await committed(settings)).items()} == await ends(settings)


async def test_polling_pauses_when_too_much_is_in_flight_and_goes_on(settings: EvaluatorSettings) -> None:
    gates, sessions = Gates(), names(10)
    tight = settings.model_copy(update={"evaluator_records": 3})
    gates.hold(*sessions)
    await build(settings, [built(name) for name in sessions])
    async with member(tight, gates) as one:
        for done in range(10):
            await gates.until_total(min(10, done + 3))
            gates.held[next(name for name in gates.began if not gates.held[name].is_set())].set()
        await evaluations(settings, 10)
        await one.drain()
    assert gates.began == dict.fromkeys(sessions, 1)


async def test_an_unreadable_record_is_passed_over(settings: EvaluatorSettings) -> None:
    gates, (name,) = Gates(), names(1, partition=2)
    async with KafkaClients(settings).producer() as producer:
        await _spoil(producer, settings, 2)
    await build(settings, [built(name)])
    async with member(settings, gates) as one:
        assert [item.session_id for item in await evaluations(settings, 1)] == [name]
        await one.drain()
        assert one.metrics.registry.get_sample_value("rollmill_unreadable_records_total") == 3
    assert (await committed(settings))[2] == Watermark((await ends(settings))[2])


async def _spoil(producer: AIOKafkaProducer, settings: EvaluatorSettings, partition: int) -> None:
    for value in (b"{not json", b"", None):
        await producer.send_and_wait(BUILT.full_name(settings.prefix), value, b"x", partition=partition)


async def test_a_commit_before_the_logs_start_stops_the_service_with_both_numbers(settings: EvaluatorSettings) -> None:
    gates, sessions = Gates(), names(6, partition=0)
    await build(settings, [built(name) for name in sessions[:3]])
    async with member(settings, gates) as first:
        await until_committed(settings, 0, Watermark(6))
        await first.drain()
    await build(settings, [built(name) for name in sessions[3:]])
    admin = KafkaClients(settings).admin()
    await admin.start()
    await admin.delete_records({TopicPartition(BUILT.full_name(settings.prefix), 0): RecordsToDelete(10)})
    await admin.close()
    async with member(settings, gates) as second:
        with pytest.raises(FatalError, match=r"offset 6 .* begins at 10: 4 records"):
            await asyncio.wait_for(second.running, WAIT)
