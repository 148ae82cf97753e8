"""What is open for longer than its input is retained is complete at the end: the changelog holds it (rules G2, G3).

The input is deleted up to the position that each task has committed, which is what retention does to it in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from rollmill.codec import JSON, decode, encode
from rollmill.models import (
    Evaluation,
    EvaluatorSpec,
    Record,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    Trajectory,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.task_identity import task_identity
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.settings import ServiceSettings
from rollmill.testing.samples.sessions import completion
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.topic_log import produce, read, read_all, running
from rollmill.topics import BUILT, COMPLETIONS, CUTS, EVALUATIONS, TRAJECTORIES, Topic
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage
from rollmill_builder import app as builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger import app as reward_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka


class Place:
    """A stage's topics, and the stage to run on them; each run is a new start from what Kafka holds."""

    def __init__(self, settings: ServiceSettings, stages: Callable[[], Sequence[Processor[Any, Any]]]) -> None:
        self.settings, self._stages = settings, stages
        self._sent = 0

    async def send(self, topic: Topic, *records: Record) -> None:
        values = [(record.session_id, encode(record, JSON)) for record in records]  # type: ignore[attr-defined]  # all do
        await produce(self.settings, topic, values)
        self._sent += len(records)

    async def run(self) -> None:
        """Until everything that was sent is in a committed position; then the process is gone."""
        async with running(self.settings, self._stages()), asyncio.timeout(60):
            while sum((await self._positions()).values()) < self._sent:  # noqa: ASYNC110  # positions have no event
                await asyncio.sleep(0.05)

    async def forget(self) -> None:
        """Delete what was read."""
        positions = await self._positions()
        admin = KafkaClients(self.settings).admin()
        await admin.start()
        try:
            await admin.delete_records({place: RecordsToDelete(offset) for place, offset in positions.items()})
        finally:
            await admin.close()
        async with KafkaClients(self.settings).reading(reset="earliest") as consumer:
            assert await consumer.beginning_offsets(list(positions)) == positions

    async def _positions(self) -> dict[TopicPartition, int]:
        identity = task_identity(self._stages()[0], 0, self.settings)
        async with KafkaClients(self.settings).reading(group_id=identity.group_id) as consumer:
            found = {place: await consumer.committed(place) for _, place in identity.inputs}
        return {place: offset for place, offset in found.items() if offset}


def common(kafka: EmbeddedKafka, prefix: str) -> dict[str, Any]:
    return {
        "bootstrap_servers": kafka.bootstrap_servers,
        "prefix": prefix,
        "partitions": 1,
        "transaction_timeout_ms": 10_000,
        "deadline_seconds": 5,
        "poll_ms": 20,
        "timer_seconds": 0.05,
    }


async def test_a_session_whose_calls_were_deleted_is_built_whole(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    settings = BuilderSettings(**common(kafka_broker, topic_prefix))
    await apply_topics(settings)
    place, now = Place(settings, lambda: builder.build(settings).stages), SystemClock().now()
    await place.send(
        COMPLETIONS,
        SessionOpened(session_id="s1", spec=SessionSpec(group_id="g"), at=now),
        completion("c1", [1, 2], [3, 4], at=now),
    )
    await place.run()
    await place.forget()
    await place.send(COMPLETIONS, completion("c2", [1, 2, 3, 4, 5], [6, 7], at=now + 1))
    await place.run()
    await place.forget()
    await place.send(COMPLETIONS, SessionClosed(session_id="s1", at=now + 2))
    await place.run()
    (record,) = await read(settings, BUILT, 1)
    trajectory: Trajectory = decode(Trajectory, record.value, tuple(record.headers))
    (trace,) = trajectory.traces
    assert trajectory.group_id == "g"
    assert trace.prompt_ids.tolist() == [1, 2]
    assert trace.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert trace.loss_mask.tolist() == [1, 1, 0, 1, 1]


async def test_a_trajectory_that_was_deleted_is_rewarded_when_its_grade_comes(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    settings = RewardMergerSettings(**common(kafka_broker, topic_prefix))
    await apply_topics(settings)
    place = Place(settings, lambda: reward_merger.build(settings).stages)
    spec = SessionSpec(evaluators=(EvaluatorSpec(strategy="judge"),), evaluation_seconds=1800.0)
    built = sample_trajectory(
        "s1", None, spec=spec, evaluation=None, ungraded_reason=None, closed_at=SystemClock().now()
    )
    await place.send(BUILT, built.replace(status=SessionStatus.COMPLETED))
    await place.run()
    await place.forget()
    await place.send(
        EVALUATIONS,
        Evaluation(evaluation_id="e1", session_id="s1", evaluator="judge", outcome_reward=0.75),
    )
    await place.run()
    (rewarded,) = await read_all(settings, TRAJECTORIES)
    assert rewarded.traces[0].reward == 0.75
    assert rewarded.traces[0].response_ids.tolist() == built.traces[0].response_ids.tolist()


async def test_a_group_whose_first_member_was_deleted_is_batched_whole(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    settings = BatcherSettings(**common(kafka_broker, topic_prefix), batch_partitions=1, groups_per_step=1)
    await apply_topics(settings)
    place, now = Place(settings, lambda: [BatcherStage(settings.batcher_config())]), SystemClock().now()
    members = [sample_trajectory(f"s{n}", float(n), closed_at=now) for n in (0, 1)]
    await place.send(TRAJECTORIES, members[0])
    await place.run()
    await place.forget()
    await place.send(TRAJECTORIES, members[1])
    async with running(settings, [BatcherStage(settings.batcher_config())]):
        (cut,) = await _cuts(settings)
    assert cut.groups == ("g",)


async def _cuts(settings: BatcherSettings) -> list[Any]:
    async with asyncio.timeout(60):
        while True:
            cuts = [cut for cut in await read_all(settings, CUTS) if cut.batch_id]
            if cuts:
                return cuts
