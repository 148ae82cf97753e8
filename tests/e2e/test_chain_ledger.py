"""The chain from events to acknowledged steps, every service killed on the way: the ledger balances at every look."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmill.codec import CONTENT_TYPE, JSON
from rollmill.ops.ledger import Balance, read_balance, settled_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import RestartPolicy, Supervisor, kafka_environment, service_program
from rollmill.settings import KafkaSettings
from rollmill.topics import COMPLETIONS
from rollmill.trainer import BatchStream

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

SERVICES = ("builder", "evaluator", "reward-merger", "batcher")
GROUPS, MEMBERS, TURNS, TOKENS = 12, 4, 3, 5
GROUPS_PER_STEP = 3
STEPS = GROUPS // GROUPS_PER_STEP
CAPTURED = GROUPS * MEMBERS * TURNS * TOKENS


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4, batch_partitions=1
    )
    await apply_topics(made)
    return made


@pytest.fixture
async def supervisor(settings: KafkaSettings, tmp_path: Path) -> AsyncIterator[Supervisor]:
    batcher = {"ROLLMILL_GROUPS_PER_STEP": str(GROUPS_PER_STEP), "ROLLMILL_MAX_STALENESS": "none"}
    environment = {"PATH": os.environ["PATH"], **kafka_environment(settings), **batcher}
    policy = RestartPolicy(first_pause=0.1)
    async with Supervisor(tmp_path, environment=environment, report=lambda _line: None, policy=policy) as made:
        for service in SERVICES:
            await made.start(service_program(service, {}))
        await made.wait_ready()
        yield made


def calls(session: str, now: float) -> list[dict[str, Any]]:
    """Every prompt is the one before, its reply, and one new token: the calls make one trace."""
    same, prompt, made = {"session_id": session, "type": "completion"}, [1, 2, 3], []
    for turn in range(TURNS):
        reply = list(range(10 + turn, 10 + turn + TOKENS))
        choice = {"token_ids": reply, "logprobs": [-0.5] * TOKENS, "finish_reason": "stop"}
        times = {"started_at": now + turn, "ended_at": now + turn + 0.5}
        made.append({**same, "completion_id": f"{session}-{turn}", **times, "prompt_ids": prompt, "choices": [choice]})
        prompt = [*prompt, *reply, 4]
    return made


def session_events(group: int, member: int, now: float) -> list[dict[str, Any]]:
    same = {"session_id": f"g{group}-m{member}"}
    spec = {"group_id": f"g{group}", "group_size": MEMBERS, "evaluators": [{"strategy": "reported"}]}
    opened = {**same, "type": "session_opened", "at": now, "spec": spec}
    closed = {**same, "type": "session_closed", "at": now + TURNS, "reward": float(member % 2)}
    return [opened, *calls(same["session_id"], now), closed]


async def produce(settings: KafkaSettings, groups: Sequence[int]) -> None:
    now = time.time()
    async with KafkaClients(settings).producer() as producer:
        for group in groups:
            for event in (each for member in range(MEMBERS) for each in session_events(group, member, now)):
                await producer.send_and_wait(
                    COMPLETIONS.full_name(settings.prefix),
                    json.dumps(event).encode(),
                    event["session_id"].encode(),
                    headers=[(CONTENT_TYPE, JSON.encode())],
                )


async def balance_when(settings: KafkaSettings, reached: Callable[[Balance], bool]) -> Balance:
    """Look at the ledger until it has got so far; it must balance at every single look."""
    async with asyncio.timeout(120):
        while True:
            balance = await read_balance(settings)
            assert balance.balanced, balance.as_json()
            assert balance.total.accounted == balance.total.captured
            if reached(balance):
                return balance


def train(settings: KafkaSettings, steps: int) -> int:
    """Acknowledge so many steps; returns the number of tokens in them."""
    tokens = 0
    with BatchStream(settings=settings, timeout=90) as stream:
        for number, step in enumerate(stream.steps(lambda: (0, 0)), 1):
            tokens += sum(int(batch.loss_mask.sum()) for batch in step)
            step.ack()
            if number == steps:
                break
    return tokens


async def test_kill_every_service_on_the_way_and_nothing_is_lost_or_doubled(
    settings: KafkaSettings, supervisor: Supervisor
) -> None:
    producing = asyncio.create_task(produce(settings, range(GROUPS)))
    for killed, service in enumerate(SERVICES, 1):
        share = CAPTURED * killed // (len(SERVICES) + 1)
        await balance_when(settings, lambda balance, share=share: balance.total.captured >= share)  # type: ignore[misc]  # bound early
        supervisor.kill(service)
    await producing
    held = await balance_when(settings, lambda balance: balance.total.captured == CAPTURED)
    assert held.total.pending == CAPTURED
    half = await asyncio.to_thread(train, settings, STEPS // 2)
    supervisor.kill("batcher")
    rest = await asyncio.to_thread(train, settings, STEPS - STEPS // 2)
    assert half + rest == CAPTURED
    settled = await settled_balance(settings)
    assert settled.balanced, settled.as_json()
    assert (settled.total.trained, settled.total.pending) == (CAPTURED, 0)
    assert all(supervisor.starts(service) >= 2 for service in SERVICES)
