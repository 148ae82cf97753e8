"""The ledger against real topics that the test writes as the stages would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from aiokafka import AIOKafkaProducer
from safetensors.numpy import save

from rollmill.cli.ledger.console import LedgerOptions, run
from rollmill.codec import JSON, Headers, encode, manifest_header
from rollmill.models import (
    BatchHeader,
    Denominators,
    Disposition,
    Manifest,
    PolicyVersion,
    Rewound,
    StepAcknowledged,
    TokenRange,
    TraceRow,
    outcome,
)
from rollmill.ops.ledger import Balance, LedgerReader, read_balance, settled_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream.changelog import POSITION, Position
from rollmill.settings import KafkaSettings
from rollmill.topics import (
    ACKS,
    BATCHES,
    BUILT,
    OUTCOMES,
    STATE_BATCHER,
    STATE_BUILDER,
    STATE_REWARD_MERGER,
    TRAJECTORIES,
    Topic,
    partition_of,
)

pytestmark = pytest.mark.kafka

TOKENS = 5


def manifest(session: str) -> Manifest:
    return Manifest(session_id=session, units=(TokenRange("c1", 0, 0, TOKENS, PolicyVersion(0, 1)),))


def header_of(session: str, step: int) -> BatchHeader:
    row = TraceRow(
        session_id=session,
        group_id="g",
        rank=0,
        micro_batch=0,
        tokens=2 * TOKENS,
        mask_sum=TOKENS,
        oldest=PolicyVersion(0, 1),
        loss_weight=1.0,
        units=manifest(session).units,
    )
    return BatchHeader(
        run="run",
        policy="policy",
        batch_id=f"b{step}",
        step=step,
        rank=0,
        world_size=1,
        micro_batch=0,
        micro_batches=1,
        policy_version=PolicyVersion(0, 1),
        denominators=Denominators(tokens=TOKENS, weighted_tokens=float(TOKENS), rollouts=1, groups=1),
        table=(row,),
    )


@dataclass
class World:
    """The topics of one prefix, written by hand."""

    settings: KafkaSettings
    producer: AIOKafkaProducer

    async def send(
        self, topic: Topic, key: str, value: bytes | None, headers: Headers = (), partition: int | None = None
    ) -> int:
        """Offset of the record."""
        count = topic.partitions(self.settings)
        place = partition_of(key.encode(), count) if partition is None else partition
        name = topic.full_name(self.settings.prefix)
        sent = await self.producer.send_and_wait(name, value, key.encode(), place, headers=list(headers))
        return int(sent.offset)

    async def say(
        self, disposition: Disposition, session: str, *, reason: str | None = None, batch: str | None = None
    ) -> None:
        units = manifest(session).units
        word = outcome(
            disposition, stage="t", session_id=session, attempt=1, units=units, reason=reason, batch_id=batch
        )
        await self.send(OUTCOMES, session, encode(word, JSON))

    async def capture(self, *sessions: str) -> None:
        for session in sessions:
            await self.say(Disposition.CAPTURED, session)

    async def hold(self, topic: Topic, session: str) -> int:
        return await self.send(topic, session, b"payload", (manifest_header(manifest(session)),))

    async def position(self, changelog: Topic, offsets: dict[str, int]) -> None:
        for partition in range(changelog.partitions(self.settings)):
            mine = {slot: at for slot, at in offsets.items() if slot.endswith(f"/{partition}")}
            single = changelog is STATE_BATCHER
            await self.send(changelog, POSITION, Position(offsets if single else mine).encode(), (), partition)

    async def batch(self, session: str, step: int) -> None:
        metadata = {"header": encode(header_of(session, step), JSON).decode()}
        tensors = {"input_ids": np.zeros(2 * TOKENS, dtype=np.int32)}
        await self.send(BATCHES, str(step), save(tensors, metadata), (), 0)

    async def acknowledge(self, step: int) -> None:
        event = StepAcknowledged(run="run", rank=0, world_size=1, step=step, batch_id=f"b{step}", at=1.0)
        await self.send(ACKS, "0", encode(event, JSON))

    async def balance(self) -> Balance:
        return await read_balance(self.settings)


@pytest.fixture
async def world(kafka_broker: EmbeddedKafka, topic_prefix: str) -> AsyncIterator[World]:
    settings = KafkaSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2, batch_partitions=1
    )
    await apply_topics(settings)
    async with KafkaClients(settings).producer() as producer:
        yield World(settings, producer)


def numbers(balance: Balance) -> Sequence[int]:
    total = balance.total
    return total.captured, total.trained, total.excluded.total(), total.pending, total.lost


async def test_empty_topics_balance(world: World) -> None:
    found = await world.balance()
    assert found.balanced
    assert numbers(found) == (0, 0, 0, 0, 0)


async def test_every_place_that_holds_tokens_counts_as_pending(world: World) -> None:
    await world.capture("s1", "s2", "s3", "s4", "s5", "s6", "s7")
    await world.hold(STATE_BUILDER, "s1")
    await world.hold(BUILT, "s2")
    await world.hold(STATE_REWARD_MERGER, "s3")
    await world.hold(TRAJECTORIES, "s4")
    await world.hold(STATE_BATCHER, "s5")
    await world.batch("s6", step=0)
    assert numbers(await world.balance()) == (7 * TOKENS, 0, 0, 6 * TOKENS, TOKENS)


async def test_records_below_the_position_are_not_held(world: World) -> None:
    await world.capture("s1", "s2")
    offset = await world.hold(BUILT, "s1")
    place = partition_of(b"s1", 2)
    await world.position(STATE_REWARD_MERGER, {f"built/{place}": offset})
    assert (await world.balance()).total.pending == TOKENS
    await world.position(STATE_REWARD_MERGER, {f"built/{place}": offset + 1})
    found = await world.balance()
    assert (found.total.pending, found.total.lost) == (0, 2 * TOKENS)
    assert not found.balanced


async def test_one_batcher_task_knows_the_positions_of_all_partitions(world: World) -> None:
    await world.capture("s1", "s2", "s3", "s4")
    ends = {f"trajectories/{partition}": 0 for partition in range(2)}
    for session in ("s1", "s2", "s3", "s4"):
        place = f"trajectories/{partition_of(session.encode(), 2)}"
        ends[place] = 1 + await world.hold(TRAJECTORIES, session)
    await world.position(STATE_BATCHER, ends)
    assert (await world.balance()).total.lost == 4 * TOKENS


async def test_tombstoned_state_holds_nothing(world: World) -> None:
    await world.capture("s1")
    await world.hold(STATE_BUILDER, "s1")
    await world.send(STATE_BUILDER, "s1", None)
    assert (await world.balance()).total.lost == TOKENS


async def test_a_unit_lost_behind_the_merger_is_lost_although_the_merger_keeps_a_copy(world: World) -> None:
    await world.capture("s1", "s2")
    for session in ("s1", "s2"):
        await world.send(STATE_REWARD_MERGER, f"{session}:1/=", b"copy", (manifest_header(manifest(session)),), 0)
    assert (await world.balance()).total.pending == 2 * TOKENS
    went_on = manifest_header(Manifest(session_id="s1"))
    await world.send(STATE_REWARD_MERGER, "s1:1/evaluations/b", b"grade", (went_on,), 0)
    found = await world.balance()
    assert (found.total.pending, found.total.lost) == (TOKENS, TOKENS)
    await world.hold(TRAJECTORIES, "s1")
    assert (await world.balance()).total.pending == 2 * TOKENS


async def test_a_second_look_reads_on_where_the_first_one_ended(world: World) -> None:
    reader = LedgerReader(world.settings)
    await world.capture("s1")
    await world.hold(BUILT, "s1")
    assert numbers(await reader.look()) == (TOKENS, 0, 0, TOKENS, 0)
    await world.say(Disposition.TRAINED, "s1", batch="b0")
    await world.capture("s2")
    await world.hold(BUILT, "s2")
    found = await reader.look()
    assert numbers(found) == (2 * TOKENS, TOKENS, 0, TOKENS, 0)
    assert found.balanced


async def test_an_acknowledged_step_holds_nothing_and_a_rewound_one_does_again(world: World) -> None:
    await world.capture("s1")
    await world.batch("s1", step=0)
    await world.acknowledge(0)
    assert (await world.balance()).total.lost == TOKENS
    await world.send(ACKS, "0", encode(Rewound(run="run", next_step=0, at=2.0), JSON))
    assert (await world.balance()).total.pending == TOKENS


async def test_records_of_an_aborted_transaction_do_not_count(world: World) -> None:
    await world.capture("s1")
    async with KafkaClients(world.settings).producer(f"{world.settings.prefix}writer") as producer:
        await producer.begin_transaction()
        other = World(world.settings, producer)
        await other.say(Disposition.TRAINED, "s1", batch="b0")
        await producer.abort_transaction()
        await producer.begin_transaction()
        await other.say(Disposition.EXCLUDED, "s1", reason="stale")
        await producer.commit_transaction()
    found = await world.balance()
    assert found.balanced
    assert dict(found.total.excluded) == {"stale": TOKENS}


async def test_what_is_no_outcome_is_told(world: World) -> None:
    await world.send(OUTCOMES, "s1", b"{}")
    found = await world.balance()
    assert found.unreadable == 1
    assert not found.balanced


async def test_settling_gives_up_after_its_time(world: World) -> None:
    await world.capture("s1", "s2")
    await world.say(Disposition.TRAINED, "s1", batch="b0")
    await world.hold(STATE_BATCHER, "s2")
    assert (await settled_balance(world.settings, timeout=0.0)).total.pending == TOKENS
    await world.say(Disposition.EXCLUDED, "s2", reason="group_expired")
    assert (await settled_balance(world.settings)).total.pending == 0


@dataclass
class Shown:
    """What a watch showed, and that it showed something."""

    texts: list[str] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.first.set()


async def test_a_watch_shows_every_look_and_ends_when_nothing_is_pending(world: World) -> None:
    await world.capture("s1")
    await world.hold(STATE_BATCHER, "s1")
    shown = Shown()
    wanted = LedgerOptions(as_json=True, settle=True, watch=True, timeout=60.0, pause=0.05)
    watching = asyncio.create_task(run(world.settings, wanted, shown))
    await asyncio.wait_for(shown.first.wait(), 60)
    await world.say(Disposition.EXCLUDED, "s1", reason="group_expired")
    last = await asyncio.wait_for(watching, 60)
    assert [json.loads(shown.texts[place])["pending"] for place in (0, -1)] == [TOKENS, 0]
    assert dict(last.total.excluded) == {"group_expired": TOKENS}


async def test_stopping_a_watch_keeps_what_it_saw_last(world: World) -> None:
    shown = Shown()
    wanted = LedgerOptions(as_json=False, settle=False, watch=True, timeout=60.0, pause=60.0)
    watching = asyncio.create_task(run(world.settings, wanted, shown))
    await asyncio.wait_for(shown.first.wait(), 60)
    watching.cancel()
    assert (await watching).balanced
    assert shown.texts[0].endswith("balanced: nothing lost, nothing doubled")
