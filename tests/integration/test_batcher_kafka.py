"""The batcher on Apache Kafka, read by the trainer's own stream: steps, acknowledgements, a restart, the books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rollmill.codec import encode
from rollmill.models import Cut, Disposition, PolicyVersion, TokenDisposition, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.topic_log import produce, read_all
from rollmill.topics import CUTS, OUTCOMES, TRAJECTORIES
from rollmill.trainer import BatchStream, PolicyPublisher, Step
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage

pytestmark = pytest.mark.kafka

WAIT = 20.0


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> BatcherSettings:
    made = BatcherSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=3,
        batch_partitions=2,
        transaction_timeout_ms=10_000,
        deadline_seconds=5,
        poll_ms=20,
        timer_seconds=0.05,
        groups_per_step=1,
        max_staleness=1,
        micro_batch_tokens=64,
    )
    await apply_topics(made)
    return made


@asynccontextmanager
async def running(settings: BatcherSettings) -> AsyncIterator[None]:
    """A batcher of its own: each time it starts from what Kafka holds."""
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), Metrics("batcher"), Health())
    stop = asyncio.Event()
    job = asyncio.create_task(run_stages([BatcherStage(settings.batcher_config())], tools, stop))
    try:
        yield
    finally:
        stop.set()
        await job


def members(group: int, now: float) -> list[Trajectory]:
    return [
        sample_trajectory(f"s{group}-{n}", float(n), group=f"g{group}", opened_at=now + group, closed_at=now + group)
        for n in (0, 1)
    ]


async def send(settings: BatcherSettings, trajectories: Sequence[Trajectory]) -> None:
    await produce(settings, TRAJECTORIES, [(item.session_id, encode(item)) for item in trajectories], headers=())


def train(settings: BatcherSettings, count: int) -> list[Step]:
    """``count`` steps, each followed by a new version: read, published, acknowledged."""
    done: list[Step] = []
    with BatchStream(settings=settings) as stream, PolicyPublisher(settings=settings) as publisher:
        for step in stream.steps(PolicyVersion, until=lambda: len(done) == count, timeout=WAIT):
            publisher.update(PolicyVersion(0, step.number + 1))
            step.ack()
            done.append(step)
    return done


async def test_a_trainer_reads_the_same_run_across_a_restart_of_the_batcher(settings: BatcherSettings) -> None:
    now = SystemClock().now()
    sent = [member for group in range(3) for member in members(group, now)]
    await send(settings, sent)
    async with running(settings):
        steps = await asyncio.to_thread(train, settings, 1)
    async with running(settings):
        steps += await asyncio.to_thread(train, settings, 1)
        words = await _until_all_is_said(settings, sent)
    cuts = await _cuts_with_batches(settings)
    assert [(step.number, step.batch_id) for step in steps] == [(cut.step, cut.batch_id) for cut in cuts]
    trained = {group for cut in cuts for group in cut.groups}
    assert len(trained) == 2
    assert _fates(words) == {m.session_id: "trained" if m.group_id in trained else "stale" for m in sent}


async def _until_all_is_said(settings: BatcherSettings, sent: Sequence[Trajectory]) -> list[TokenDisposition]:
    async with asyncio.timeout(WAIT):
        while True:
            words: list[TokenDisposition] = await read_all(settings, OUTCOMES)
            if sum(word.tokens for word in words) >= sum(member.trained_tokens for member in sent):
                return words


async def _cuts_with_batches(settings: BatcherSettings) -> list[Cut]:
    cuts: list[Cut] = await read_all(settings, CUTS)
    assert [cut.sequence for cut in cuts] == list(range(len(cuts)))
    return [cut for cut in cuts if cut.batch_id is not None]


def _fates(words: Sequence[TokenDisposition]) -> dict[str, str | None]:
    assert len(words) == len({word.session_id for word in words})
    return {
        word.session_id: "trained" if word.disposition is Disposition.TRAINED else word.reason
        for word in sorted(words, key=lambda word: word.session_id)
    }
