"""One batcher per run: a second one of the same run fences the first; runs on one cluster do not see each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmill.codec import encode
from rollmill.errors import FencedError
from rollmill.models import Cut, Trajectory
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
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage

pytestmark = pytest.mark.kafka

WAIT = 30.0


def settings_of(broker: EmbeddedKafka, prefix: str, **changes: Any) -> BatcherSettings:
    return BatcherSettings(
        bootstrap_servers=broker.bootstrap_servers,
        prefix=prefix,
        partitions=2,
        batch_partitions=1,
        transaction_timeout_ms=10_000,
        deadline_seconds=5,
        poll_ms=20,
        timer_seconds=0.05,
        groups_per_step=1,
        steps_ahead=100,
        micro_batch_tokens=64,
        **changes,
    )


@asynccontextmanager
async def running(settings: BatcherSettings) -> AsyncIterator[asyncio.Task[None]]:
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), Metrics("batcher"), Health())
    stop = asyncio.Event()
    job = asyncio.create_task(run_stages([BatcherStage(settings.batcher_config())], tools, stop))
    try:
        yield job
    finally:
        stop.set()
        await asyncio.gather(job, return_exceptions=True)


def group(name: str, policy: str = "policy") -> list[Trajectory]:
    now = SystemClock().now()
    return [
        sample_trajectory(f"{name}-{n}", float(n), group=name, policy=policy, opened_at=now, closed_at=now)
        for n in (0, 1)
    ]


async def send(settings: BatcherSettings, trajectories: Sequence[Trajectory]) -> None:
    await produce(settings, TRAJECTORIES, [(item.session_id, encode(item)) for item in trajectories], headers=())


async def steps_of(settings: BatcherSettings, count: int) -> list[tuple[str, ...]]:
    """The groups of the steps, once there are ``count``."""
    async with asyncio.timeout(WAIT):
        while True:
            cuts: list[Cut] = await read_all(settings, CUTS)
            assert [cut.sequence for cut in cuts] == list(range(len(cuts)))
            made = [cut.groups for cut in cuts if cut.batch_id is not None]
            if len(made) >= count:
                return made


async def test_a_second_batcher_of_a_run_fences_the_first(kafka_broker: EmbeddedKafka, topic_prefix: str) -> None:
    settings = settings_of(kafka_broker, topic_prefix)
    await apply_topics(settings)
    async with running(settings) as first:
        await send(settings, group("g0"))
        assert await steps_of(settings, 1) == [("g0",)]
        async with running(settings):
            await send(settings, group("g1"))
            assert await steps_of(settings, 2) == [("g0",), ("g1",)]
            with pytest.raises(FencedError) as fenced:
                await asyncio.wait_for(first, WAIT)
            assert fenced.value.exit_code == 75
            await send(settings, group("g2"))
            assert await steps_of(settings, 3) == [("g0",), ("g1",), ("g2",)]


async def test_runs_on_one_cluster_do_not_see_each_other(kafka_broker: EmbeddedKafka, topic_prefix: str) -> None:
    """Equal run names, groups and policies; only the prefix differs. A session of another policy is named."""
    one, other = (settings_of(kafka_broker, f"{topic_prefix}{name}.") for name in ("a", "b"))
    for settings in (one, other):
        await apply_topics(settings)
    async with running(one), running(other):
        await send(one, [*group("g0"), *group("h0", policy="second")])
        await send(other, group("g1"))
        assert await steps_of(one, 1) == [("g0",)]
        assert await steps_of(other, 1) == [("g1",)]
    assert {word.reason for word in await read_all(one, OUTCOMES)} == {"other_policy"}
    assert await read_all(other, OUTCOMES) == []
