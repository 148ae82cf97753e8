"""Five hundred sessions, slow evaluators, failing infrastructure and a kill -9: each is graded once, or named.

``make grading-soak`` runs it with evaluators of up to a minute (``ROLLMILL_GRADING_SECONDS``).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from aiokafka import ConsumerRecord, TopicPartition

from rollmill.codec import MSGPACK, decode, encode
from rollmill.models import Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.testing.processes import ServiceProcess, service_process
from rollmill.testing.samples.trajectories import sample_trace
from rollmill.testing.topic_log import read_all, running
from rollmill.topics import BUILT, DEAD_LETTERS, EVALUATIONS, TRAJECTORIES, partition_of
from rollmill_reward_merger.app import build
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

SESSIONS = 500
LONGEST = float(os.environ.get("ROLLMILL_GRADING_SECONDS", "6"))
"""Of one evaluation, in seconds."""
FAULTS = 0.03
PARTITIONS = 4
SPREAD_SECONDS = 8.0
"""In which the sessions are built."""
QUICK, SLOW = "session_completed", "scripted"
PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> RewardMergerSettings:
    made = RewardMergerSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=PARTITIONS,
        session_timeout_ms=6000,
        poll_ms=20,
    )
    await apply_topics(made)
    return made


def environment(settings: RewardMergerSettings, *classes: str) -> Mapping[str, str]:
    return {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": str(PARTITIONS),
        "ROLLMILL_SESSION_TIMEOUT_MS": str(settings.session_timeout_ms),
        "ROLLMILL_EVALUATOR_CLASSES": orjson.dumps(classes).decode(),
        "ROLLMILL_EVALUATOR_CONCURRENCY": "256",
        "ROLLMILL_EVALUATOR_RETRY_SECONDS": "0.1",
        "PYTHONPATH": str(PROGRAMS),
        "ROLLMILL_STRATEGY_MODULES": "scripted_grader",
    }


def session(number: int, chance: random.Random) -> Trajectory:
    config = {"seconds": chance.uniform(0, LONGEST), "reward": number / SESSIONS, "fault": chance.random() < FAULTS}
    evaluators = (
        EvaluatorSpec(strategy=QUICK, weight=0.0),
        EvaluatorSpec(strategy="scripted_grader:ScriptedGrader", name=SLOW, config=config),
    )
    name = f"s{number}"
    return Trajectory(
        session_id=name,
        status=SessionStatus.COMPLETED,
        spec=SessionSpec(evaluators=evaluators),
        closed_at=time.time(),
        traces=(sample_trace(name),),
    )


@dataclass
class Said:
    """What is on ``evaluations``, followed as it grows. Times are the log's own, in milliseconds."""

    records: list[tuple[Evaluation, int]] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def follow(self, settings: RewardMergerSettings) -> None:
        topic = EVALUATIONS.full_name(settings.prefix)
        async with KafkaClients(settings).reading(reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
            while True:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    self.records += [(_evaluation(record), record.timestamp) for record in records]
                async with self.grown:
                    self.grown.notify_all()

    def by(self, evaluator: str) -> dict[str, set[str]]:
        """The ids of its evaluations, by session."""
        found: dict[str, set[str]] = {}
        for evaluation, _ in self.records:
            if evaluation.evaluator == evaluator:
                found.setdefault(evaluation.session_id, set()).add(evaluation.evaluation_id)
        return found

    async def until(self, evaluator: str, count: int) -> None:
        async with asyncio.timeout(40 + 8 * LONGEST), self.grown:
            await self.grown.wait_for(lambda: len(self.by(evaluator)) >= count)


def _evaluation(record: ConsumerRecord[bytes, bytes]) -> Evaluation:
    evaluation: Evaluation = decode(Evaluation, record.value, tuple(record.headers))
    return evaluation


async def build_all(settings: RewardMergerSettings, sessions: list[Trajectory]) -> dict[str, int]:
    """Spread over some seconds; when each was in the log, in milliseconds."""
    topic, began = BUILT.full_name(settings.prefix), time.monotonic()
    times: dict[str, int] = {}
    async with KafkaClients(settings).producer(linger_ms=0) as producer:
        for number, trajectory in enumerate(sessions):
            await asyncio.sleep(max(0.0, began + SPREAD_SECONDS * number / len(sessions) - time.monotonic()))
            key = trajectory.session_id.encode()
            sent = await producer.send_and_wait(
                topic,
                encode(trajectory, MSGPACK),
                key,
                partition=partition_of(key, PARTITIONS),
                headers=[("content-type", MSGPACK.encode())],
            )
            times[trajectory.session_id] = sent.timestamp
    return times


async def ready(process: ServiceProcess, members: int) -> None:
    """Wait until so many groups have been given their partitions."""
    async with asyncio.timeout(60):
        while process.log.count(b"partitions assigned") < members:
            await process.wait_for_log(b"partitions assigned")
            await asyncio.sleep(0.05)


async def test_each_session_is_graded_once_or_named_and_quick_ones_do_not_wait(
    settings: RewardMergerSettings,
) -> None:
    chance = random.Random(7)  # noqa: S311  # a seed, no secret
    sessions = [session(number, chance) for number in range(SESSIONS)]
    said = Said()
    async with AsyncExitStack() as stack:
        quick = await stack.enter_async_context(
            service_process("rollmill_evaluator", environment(settings, "light", "remote"))
        )
        slow = await stack.enter_async_context(
            service_process("rollmill_evaluator", environment(settings, "custom", "sandbox"))
        )
        await ready(quick, 2)
        await ready(slow, 2)
        await stack.enter_async_context(running(settings, build(settings).stages))
        following = asyncio.create_task(said.follow(settings))
        stack.callback(following.cancel)
        building = asyncio.create_task(build_all(settings, sessions))
        await said.until(SLOW, SESSIONS // 4)
        await slow.kill()
        again = await stack.enter_async_context(
            service_process("rollmill_evaluator", environment(settings, "custom", "sandbox"))
        )
        built_at = await building
        await said.until(SLOW, SESSIONS)
        await said.until(QUICK, SESSIONS)
        trajectories = await _until_merged(settings)
        assert await quick.stop() == 0
        assert await again.stop() == 0

    waits = sorted(at - built_at[said.session_id] for said, at in said.records if said.evaluator == QUICK)
    assert len(waits) == SESSIONS
    p95 = waits[int(len(waits) * 0.95)] / 1000
    repeated = sum(Counter(said.evaluation_id for said, _ in said.records).values()) - 2 * SESSIONS
    print(f"session_completed p50 {waits[len(waits) // 2]} ms, p95 {p95 * 1000:.0f} ms; repeated {repeated}")  # noqa: T201  # measured
    assert p95 < 1.0
    assert all(len(ids) == 1 for evaluator in (QUICK, SLOW) for ids in said.by(evaluator).values())

    expected = {item.session_id: item.spec.evaluators[1].config for item in sessions}
    faults = {name for name, config in expected.items() if config["fault"]}
    assert faults
    assert [item.revision for item in trajectories] == [0] * SESSIONS
    for item in trajectories:
        failed = item.session_id in faults
        assert item.ungraded_reason == ("machine_lost" if failed else None)
        assert item.outcome_reward == (None if failed else expected[item.session_id]["reward"])
    assert await read_all(settings, DEAD_LETTERS) == []


async def _until_merged(settings: RewardMergerSettings) -> list[Trajectory]:
    async with asyncio.timeout(30):
        while len(found := await read_all(settings, TRAJECTORIES)) < SESSIONS:
            continue
    assert len({item.session_id for item in found}) == SESSIONS
    return found
