"""The reward-merger on Apache Kafka: restarts, deadlines, external graders, poison, the end of a session's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from confluent_kafka import Message, Producer

from rollmill.codec import DEAD_LETTER, JSON, decode, encode, header, read_manifest
from rollmill.models import DeadLetterInfo, Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import (
    BUILT,
    DEAD_LETTERS,
    EVALUATIONS,
    OUTCOMES,
    STATE_REWARD_MERGER,
    TRAJECTORIES,
    Topic,
    partition_of,
)
from rollmill_reward_merger.app import build
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka

WAIT = 30.0
PARTITIONS = 2
TOPICS = (BUILT, EVALUATIONS, TRAJECTORIES, STATE_REWARD_MERGER, DEAD_LETTERS, OUTCOMES)


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> RewardMergerSettings:
    made = RewardMergerSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=PARTITIONS,
        transaction_timeout_ms=10_000,
        deadline_seconds=5,
        poll_ms=20,
        timer_seconds=0.05,
    )
    await apply_topics(made, TOPICS)
    return made


@asynccontextmanager
async def merging(settings: RewardMergerSettings) -> AsyncIterator[None]:
    """A merger of its own: each time it starts from what Kafka holds."""
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), Metrics("reward-merger"), Health())
    stop = asyncio.Event()
    job = asyncio.create_task(run_stages(build(settings).stages, tools, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(job, WAIT)


def built(session_id: str, *evaluators: str, seconds: float = 1800.0) -> Trajectory:
    spec = SessionSpec(
        evaluators=tuple(EvaluatorSpec(strategy=name) for name in evaluators), evaluation_seconds=seconds
    )
    return Trajectory(session_id=session_id, status=SessionStatus.COMPLETED, spec=spec, closed_at=time.time())


def said(name: str, session_id: str, **values: Any) -> Evaluation:
    return Evaluation(**{"evaluation_id": name, "session_id": session_id, "evaluator": "judge", **values})


def home(session_id: str) -> int:
    return partition_of(session_id.encode(), PARTITIONS)


async def send(
    settings: RewardMergerSettings, topic: Topic, value: bytes, *, partition: int, key: bytes | None = None
) -> None:
    async with KafkaClients(settings).producer() as producer:
        await producer.send_and_wait(topic.full_name(settings.prefix), value, key, partition=partition)


async def send_built(settings: RewardMergerSettings, trajectory: Trajectory) -> None:
    name = trajectory.session_id
    await send(settings, BUILT, encode(trajectory), partition=home(name), key=name.encode())


async def send_said(settings: RewardMergerSettings, evaluation: Evaluation) -> None:
    await send(settings, EVALUATIONS, encode(evaluation, JSON), partition=home(evaluation.session_id))


async def read(
    settings: RewardMergerSettings, topic: Topic, done: Callable[[list[Any]], bool]
) -> list[ConsumerRecord[bytes, bytes]]:
    """All committed records of a topic, once ``done`` says so of them."""
    places = [TopicPartition(topic.full_name(settings.prefix), number) for number in range(PARTITIONS)]
    found: list[ConsumerRecord[bytes, bytes]] = []
    async with KafkaClients(settings).reading(reset="earliest") as consumer, asyncio.timeout(WAIT):
        consumer.assign(places)
        while not done(found):
            for records in (await consumer.getmany(timeout_ms=100)).values():
                found += records
    return found


async def merged(settings: RewardMergerSettings, count: int) -> dict[str, list[Trajectory]]:
    """The revisions by session, of ``count`` trajectories; the unread header must tell the same units."""
    by_session: dict[str, list[Trajectory]] = {}
    for record in await read(settings, TRAJECTORIES, lambda found: len(found) >= count):
        trajectory: Trajectory = decode(Trajectory, record.value, tuple(record.headers))
        assert record.key == trajectory.session_id.encode()
        assert record.partition == home(trajectory.session_id)
        assert read_manifest(tuple(record.headers)) == trajectory.manifest
        by_session.setdefault(trajectory.session_id, []).append(trajectory)
    return by_session


def told(trajectories: list[Trajectory]) -> list[tuple[int | None, float | None, str | None]]:
    return [(item.revision, item.outcome_reward, item.ungraded_reason) for item in trajectories]


async def test_a_restart_between_trajectory_and_grade_loses_neither(settings: RewardMergerSettings) -> None:
    async with merging(settings):
        await send_built(settings, built("plain"))
        await send_built(settings, built("graded", "judge"))
        await send_said(settings, said("e0", "early", outcome_reward=0.25))
        assert told((await merged(settings, 1))["plain"]) == [(0, None, "no_evaluator")]
    await send_said(settings, said("e1", "graded", outcome_reward=0.0))
    async with merging(settings):
        await send_built(settings, built("early", "judge"))
        await send_said(settings, said("e2", "graded", outcome_reward=1.0, supersedes="e1"))
        found = await merged(settings, 4)
    assert told(found["early"]) == [(0, 0.25, None)]
    assert told(found["graded"]) == [(0, 0.0, None), (1, 1.0, None)]


async def test_an_external_grader_may_use_any_partition_and_no_key(settings: RewardMergerSettings) -> None:
    names = [f"s{number}" for number in range(6)]
    async with merging(settings):
        for name in names:
            await send_built(settings, built(name, "judge"))
        for number, name in enumerate(names):
            value = encode(said(f"e{number}", name, outcome_reward=number / 10), JSON)
            await send(settings, EVALUATIONS, value, partition=number % PARTITIONS)
        found = await merged(settings, 6)
    assert {name: told(items) for name, items in found.items()} == {
        name: [(0, number / 10, None)] for number, name in enumerate(names)
    }


def say_from_outside(settings: RewardMergerSettings, evaluations: list[Evaluation]) -> set[int | None]:
    """As a grader of another language would: librdkafka with its default partitioner; the partitions that it chose."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    chosen: set[int | None] = set()
    misplaced: list[bool] = []

    def heard(error: object, message: Message) -> None:
        assert error is None
        chosen.add(message.partition())
        misplaced.append(message.partition() != home((message.key() or b"").decode()))

    for evaluation in evaluations:
        value = evaluation.model_dump_json(exclude_defaults=True).encode()
        producer.produce(EVALUATIONS.full_name(settings.prefix), value, evaluation.session_id, on_delivery=heard)
    assert producer.flush(WAIT) == 0
    assert any(misplaced)
    return chosen


async def test_every_reward_of_a_grader_with_another_partitioner_joins(settings: RewardMergerSettings) -> None:
    """Plain JSON without headers, half of it before the trajectory; its partitions are not those of the sessions."""
    names = [f"s{number}" for number in range(40)]
    words = [said(f"of-{name}", name, outcome_reward=index / 40) for index, name in enumerate(names)]
    async with merging(settings):
        assert await asyncio.to_thread(say_from_outside, settings, words[:20]) == {0, 1}
        for name in names:
            await send_built(settings, built(name, "judge"))
        await asyncio.to_thread(say_from_outside, settings, words[20:])
        found = await merged(settings, 40)
    assert {name: told(items) for name, items in found.items()} == {
        name: [(0, index / 40, None)] for index, name in enumerate(names)
    }


async def test_a_missing_grade_ends_at_its_deadline_and_a_late_one_revises_it(settings: RewardMergerSettings) -> None:
    async with merging(settings):
        await send_built(settings, built("s1", "judge", seconds=0.2))
        assert told((await merged(settings, 1))["s1"]) == [(0, None, "deadline")]
        await send_said(settings, said("e1", "s1", outcome_reward=1.0))
        assert told((await merged(settings, 2))["s1"]) == [(0, None, "deadline"), (1, 1.0, None)]


async def test_poison_is_set_aside_with_its_source_and_the_next_record_counts(settings: RewardMergerSettings) -> None:
    bad = b'{"evaluation_id":"e0","session_id":"s1","evaluator":"judge","outcome_reward":true}'
    async with merging(settings):
        await send_built(settings, built("s1", "judge"))
        await send(settings, EVALUATIONS, bad, partition=home("s1"))
        await send_said(settings, said("e1", "s1", outcome_reward=1.0))
        assert told((await merged(settings, 1))["s1"]) == [(0, 1.0, None)]
        (letter,) = await read(settings, DEAD_LETTERS, lambda found: len(found) >= 1)
    info = decode(DeadLetterInfo, header(tuple(letter.headers), DEAD_LETTER))
    assert letter.value == bad
    assert (info.reason, info.stage, info.topic, info.offset) == ("invalid", "reward-merger", "evaluations", 0)


async def test_a_session_leaves_no_state_behind(settings: RewardMergerSettings) -> None:
    hasty = settings.model_copy(update={"revision_window_seconds": 0.0, "marker_window_seconds": 0.0})
    async with merging(hasty):
        await send_built(settings, built("s1", "judge"))
        await send_said(settings, said("e1", "s1", outcome_reward=1.0))
        assert told((await merged(settings, 1))["s1"]) == [(0, 1.0, None)]
        records = await read(settings, STATE_REWARD_MERGER, lambda found: _is_over(found) and len(_live(found)) == 0)
    assert any(key.startswith(b"s1:1/closed") for key in (record.key for record in records))


def _is_over(records: list[ConsumerRecord[bytes, bytes]]) -> bool:
    """The marker was written and is gone."""
    return any(record.key.startswith(b"s1:1/closed") and record.value is None for record in records)


def _live(records: list[ConsumerRecord[bytes, bytes]]) -> dict[bytes, bytes]:
    newest = {record.key: record.value for record in records}
    return {key: value for key, value in newest.items() if value is not None and not key.startswith(b"!")}
