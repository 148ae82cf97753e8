"""The ledger begins at the log's first byte: what the builder has not read, and what it set aside (F13)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aiokafka import AIOKafkaProducer

from rollmill.cli.ledger.console import LedgerOptions, run
from rollmill.cli.tail import follow
from rollmill.codec import encode
from rollmill.models import CompletionRecord, PolicySpan, PolicyVersion, SampledChoice
from rollmill.ops.dlq import open_manager
from rollmill.ops.ledger import Balance, LedgerReader, settled_balance
from rollmill.runtime.claim_check import BlobReference
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import Supervisor, kafka_environment, service_program
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.settings import KafkaSettings
from rollmill.topics import COMPLETIONS, partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

SECONDS = 60
TOKENS = 3
V1 = PolicyVersion(0, 1)


def call(session: str, completion: str = "c1", at: float = 0.0) -> CompletionRecord:
    choice = SampledChoice(token_ids=np.arange(TOKENS, dtype=np.int32), logprobs=np.zeros(TOKENS, dtype=np.float32))
    return CompletionRecord(
        session_id=session,
        completion_id=completion,
        choices=(choice,),
        policy=PolicySpan(before=V1, after=V1),
        started_at=at,
        ended_at=at,
    )


def refused(session: str, tokens: int = 2) -> bytes:
    """A call whose log-probs are one too few: the model refuses it."""
    choice = {"token_ids": list(range(tokens)), "logprobs": [-0.5] * (tokens - 1)}
    record = {"type": "completion", "session_id": session, "completion_id": "bad", "choices": [choice]}
    return json.dumps(record).encode()


@dataclass
class Log:
    settings: KafkaSettings
    producer: AIOKafkaProducer

    async def send(self, session: str, value: bytes) -> None:
        name = COMPLETIONS.full_name(self.settings.prefix)
        key = session.encode()
        await self.producer.send_and_wait(name, value, key, partition_of(key, COMPLETIONS.partitions(self.settings)))


@pytest.fixture
async def log(kafka_broker: EmbeddedKafka, topic_prefix: str) -> AsyncIterator[Log]:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2)
    await apply_topics(settings)
    async with KafkaClients(settings).producer() as producer:
        yield Log(settings, producer)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    async with Supervisor(tmp_path / "logs", environment=os.environ, report=print) as supervisor:
        yield supervisor


async def start_builder(supervisor: Supervisor, log: Log) -> None:
    await supervisor.start(service_program("builder", kafka_environment(log.settings)))
    await supervisor.wait_ready()


async def look_until(reader: LedgerReader, seen: Callable[[Balance], bool]) -> Balance:
    async with asyncio.timeout(SECONDS):
        while not seen(balance := await reader.look()):
            assert balance.balanced
    return balance


async def test_f13_a_backlog_that_the_builder_has_not_read_is_captured_and_pending(
    log: Log, supervisor: Supervisor
) -> None:
    for number in range(50):
        await log.send(f"s{number}", encode(call(f"s{number}", at=1000.0 + number)))
    reader = LedgerReader(log.settings)
    for _ in range(2):
        found = await reader.look()
        assert (found.total.captured, found.total.pending, found.balanced, found.settled) == (150, 150, True, False)
        assert found.by_version[V1].pending == 150
        assert found.by_length["to_256"].pending == 150
        assert (found.pending_since, found.sessions["to_256"]) == (1000.0, 50)
        assert [item.session_id for item in found.oldest(3)] == ["s0", "s1", "s2"]
    assert not (await settled_balance(log.settings, timeout=0)).settled
    await log.send("s0", encode(call("s0", at=1000.0)))  # twice: once
    await start_builder(supervisor, log)
    await log.send("end", refused("end"))
    found = await look_until(reader, lambda balance: balance.total.dead_lettered.total() > 0)
    assert (found.total.captured, found.total.pending, found.balanced) == (152, 150, True)


async def test_f13_every_look_while_the_builder_reads_finds_every_token(log: Log, supervisor: Supervisor) -> None:
    reader = LedgerReader(log.settings)
    starting = asyncio.create_task(start_builder(supervisor, log))
    for number in range(300):
        await log.send(f"s{number}", encode(call(f"s{number}")))
        if number % 30 == 0:
            found = (await reader.look()).total
            assert (found.captured, found.pending, found.balanced) == (
                TOKENS * (number + 1),
                TOKENS * (number + 1),
                True,
            )
    await starting


async def test_f13_a_call_that_the_builder_sets_aside_is_captured_and_dead_lettered(
    log: Log, supervisor: Supervisor
) -> None:
    await start_builder(supervisor, log)
    await log.send("good", encode(call("good")))
    await log.send("bad", refused("bad", tokens=2))
    await log.send("good", encode(call("good").replace(ended_at=7.0)))  # a conflict: its reply was captured
    await log.send("bytes", b"\xc1")
    reader = LedgerReader(log.settings)
    found = await look_until(
        reader, lambda balance: bool(balance.total.dead_lettered) and bool(balance.total.captured > 4)
    )
    assert dict(found.total.dead_lettered) == {"invalid": 2}
    assert (found.total.captured, found.total.pending) == (5, 3)
    async with open_manager(log.settings, SystemClock(), "test") as manager:
        number = next(number for number, letter in manager.letters.items() if letter.key == b"bad")
        await manager.drop(number, "its log-probs are gone")
    assert dict((await reader.look()).total.dead_lettered) == {"invalid": 2}


async def test_f13_a_dead_letter_that_is_replayed_waits_until_it_is_decided_again(
    log: Log, supervisor: Supervisor
) -> None:
    await start_builder(supervisor, log)
    await log.send("bad", refused("bad"))
    reader = LedgerReader(log.settings)
    await look_until(reader, lambda balance: bool(balance.total.dead_lettered))
    await supervisor.stop("builder")
    async with open_manager(log.settings, SystemClock(), "test") as manager:
        await manager.replay(next(iter(manager.letters)))
    for look in (reader, LedgerReader(log.settings)):
        found = (await look.look()).total
        assert (found.captured, found.pending, found.dead_lettered.total()) == (2, 2, 0)


async def test_the_oldest_pending_sessions_are_named_on_the_console(log: Log) -> None:
    await log.send("old", encode(call("old", at=1000.0)))
    await log.send("new", encode(call("new", at=2000.0)))
    texts: list[str] = []
    for as_json in (False, True):
        options = LedgerOptions(as_json, settle=False, watch=False, timeout=0, pause=0, oldest=1)
        await run(log.settings, options, texts.append)
    assert "3 tokens of old, attempt 1" in texts[0]
    assert json.loads(texts[1])["oldest"] == [{"session_id": "old", "attempt": 1, "tokens": 3, "since": 1000.0}]


async def test_a_tail_shows_the_records_of_one_session(log: Log) -> None:
    for session in ("a", "b", "a"):
        await log.send(session, encode(call(session)))
    lines = follow(log.settings, COMPLETIONS, from_beginning=True, limit=2, full=False, key="a")
    assert [json.loads(line)["key"] async for line in lines] == ["a", "a"]


async def test_a_reference_without_its_storage_is_not_counted_and_not_settled(log: Log) -> None:
    await log.send("s", BlobReference.to(encode(call("s")), "application/msgpack").encode())
    texts: list[str] = []
    balance = await run(
        log.settings, LedgerOptions(as_json=False, settle=False, watch=False, timeout=0, pause=0), texts.append
    )
    assert (balance.uncounted, balance.settled, balance.balanced) == (1, False, True)
    assert "1 records that the builder has not read cannot be counted" in texts[0]
