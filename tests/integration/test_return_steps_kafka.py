"""Four ranks die and three come back: their steps are laid out anew, and nothing is lost or doubled (rule R4)."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from rollmill.codec import encode
from rollmill.errors import ConfigurationError, RetryableError
from rollmill.models import Disposition, PolicyVersion, Trajectory, outcome
from rollmill.ops.ledger import read_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.topic_log import produce, running
from rollmill.topics import OUTCOMES, TRAJECTORIES
from rollmill.trainer import BatchStream, Step
from rollmill.trainer.batches.resharding import return_steps
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage

pytestmark = pytest.mark.kafka

WAIT = 30.0
GROUPS, SIZE = 5, 6


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> BatcherSettings:
    made = BatcherSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=2,
        batch_partitions=4,
        transaction_timeout_ms=10_000,
        deadline_seconds=5,
        poll_ms=20,
        timer_seconds=0.05,
        groups_per_step=1,
        steps_ahead=2,
        returnable_steps=1,
        max_staleness=None,
        micro_batch_tokens=10,
        world_size=4,
    )
    await apply_topics(made)
    return made


def rollouts() -> list[Trajectory]:
    now = SystemClock().now()
    return [
        sample_trajectory(
            f"s{group}-{n}", float(n), group=f"g{group}", size=SIZE, opened_at=now + group, closed_at=now + group
        )
        for group in range(GROUPS)
        for n in range(SIZE)
    ]


async def send(settings: BatcherSettings, members: Sequence[Trajectory]) -> None:
    captured = [
        outcome(
            Disposition.CAPTURED,
            stage="builder",
            session_id=member.session_id,
            attempt=1,
            units=member.manifest.units,
            at=1.0,
        )
        for member in members
    ]
    await produce(settings, OUTCOMES, [(word.session_id, encode(word, OUTCOMES.format)) for word in captured])
    await produce(settings, TRAJECTORIES, [(item.session_id, encode(item)) for item in members], headers=())


def train(settings: BatcherSettings, rank: int, ranks: int, count: int, *states: dict[str, Any]) -> list[Step]:
    done: list[Step] = []
    with BatchStream(rank, ranks, settings=settings, timeout=WAIT) as stream:
        if states:
            stream.load_state_dict(*states)
        for step in stream.steps(PolicyVersion, until=lambda: len(done) == count):
            step.ack()
            done.append(step)
    return done


def together(settings: BatcherSettings, ranks: int, count: int, *states: dict[str, Any]) -> list[list[Step]]:
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(train, settings, rank, ranks, count, *states) for rank in range(ranks)]
        return [job.result() for job in jobs]


def uneven_end(settings: BatcherSettings) -> list[dict[str, Any]]:
    """All ranks finish step 0 and keep a checkpoint, two of them step 1; then all are killed."""
    with ExitStack() as open_streams:
        streams = [open_streams.enter_context(BatchStream(r, 4, settings=settings, timeout=WAIT)) for r in range(4)]
        for stream in streams:
            next(stream.steps(PolicyVersion)).ack()
        states = [stream.state_dict() for stream in streams]
        for stream in streams[:2]:
            next(stream.steps(PolicyVersion)).ack()
        return states


def by_hand(settings: BatcherSettings, *options: str) -> subprocess.CompletedProcess[str]:
    """What a person types."""
    counts = {"ROLLMILL_PARTITIONS": settings.partitions, "ROLLMILL_BATCH_PARTITIONS": settings.batch_partitions}
    where = ("--bootstrap-servers", settings.bootstrap_servers, "--prefix", settings.prefix)
    return subprocess.run(
        [sys.executable, "-m", "rollmill.cli", "batches", "return", *options, *where],
        env={**os.environ, **{name: str(count) for name, count in counts.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def content(steps: Sequence[Step]) -> list[tuple[str, tuple[int, ...]]]:
    """Session and tokens of all trained traces of one step over its ranks."""
    rows = [
        (step.header.table[row].session_id, tuple(packed.input_ids[a:b].tolist()))
        for step in steps
        for packed in step.arrays
        for row, a, b in zip(packed.trace_index.tolist(), packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True)
        if row >= 0
    ]
    return sorted(rows)


async def test_four_ranks_become_three_and_nothing_is_lost_or_doubled(settings: BatcherSettings) -> None:
    members = rollouts()
    await send(settings, members)
    async with running(settings, [BatcherStage(settings.batcher_config())]):
        states = await asyncio.to_thread(uneven_end, settings)
        with pytest.raises(ConfigurationError, match=r"`rollmill batches return --world-size 3 --from-step 1`"):
            await asyncio.to_thread(train, settings, 0, 3, 1, *states)
        placed = await return_steps(settings, SystemClock(), 3, None, WAIT)
        assert (placed.next_step, placed.world_size, placed.placement) == (1, 3, 1)
        assert (await read_balance(settings)).balanced
        by_rank = await asyncio.to_thread(together, settings, 3, GROUPS - 1, *states)
        assert [[step.number for step in steps] for steps in by_rank] == [[1, 2, 3, 4]] * 3
        for number, of_all in enumerate(zip(*by_rank, strict=True), 1):
            wanted = [member for member in members if member.group_id == f"g{number}"]
            assert [name for name, _ in content(of_all)] == sorted(member.session_id for member in wanted)
            assert len({step.batch_id for step in of_all}) == 1
            assert len({len(step) for step in of_all}) == 1
        balance = await read_balance(settings)
    assert balance.balanced
    assert balance.total.trained == balance.total.captured == sum(member.trained_tokens for member in members)


async def test_a_checkpoint_before_acknowledged_steps_goes_back_as_far_as_their_groups_are_kept(
    settings: BatcherSettings,
) -> None:
    await send(settings, rollouts())
    async with running(settings, [BatcherStage(settings.batcher_config())]):
        before = await asyncio.to_thread(together, settings, 4, 2)
        with pytest.raises(RetryableError, match="has not answered"):
            await return_steps(settings, SystemClock(), 3, 0, 2.0)
        done = await asyncio.to_thread(by_hand, settings, "--world-size", "3", "--from-step", "1")
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"[1-3] steps from step 1 on are laid out for 3 ranks\n", done.stdout)
        after = await asyncio.to_thread(together, settings, 3, GROUPS - 1)
        balance = await read_balance(settings)
    assert content([steps[1] for steps in before]) == content([steps[0] for steps in after])
    assert {steps[1].batch_id for steps in before} == {steps[0].batch_id for steps in after}
    assert balance.balanced
    assert balance.total.pending == 0
