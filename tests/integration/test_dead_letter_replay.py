"""A bad deploy sets records aside; after the fix they are driven again, and the ledger has every token once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rollmill.cli.commands import app
from rollmill.errors import FencedError
from rollmill.ops.dlq import LetterNumber, open_manager, read_letters
from rollmill.ops.ledger import Balance, read_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream import InputRecord, Outputs, Processor, StateView
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.settings import ServiceSettings
from rollmill.testing.topic_log import produce, read, running
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, TRAJECTORIES
from rollmill_batcher.app import build as build_batcher
from rollmill_batcher.settings import BatcherSettings
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.state import StateValue
from rollmill_reward_merger.timers import TimerScheduler

pytestmark = pytest.mark.kafka

TOKENS = 3


class BadDeploy(RewardMergerStage):
    """Fails on every session whose id says so."""

    def process(self, state: StateView[StateValue], record: InputRecord, local: TimerScheduler) -> Outputs:
        if record.key.startswith(b"bad"):
            raise KeyError(record.key)
        return super().process(state, record, local)


def session(name: str, at: float = 1.0) -> list[tuple[str, bytes]]:
    same = {"session_id": name}
    choice = {"token_ids": [7, 8, 9], "logprobs": [-0.5] * TOKENS, "finish_reason": "stop"}
    events: list[dict[str, Any]] = [
        {**same, "type": "session_opened", "at": at},
        {
            **same,
            "type": "completion",
            "completion_id": f"{name}-1",
            "prompt_ids": [1, 2],
            "choices": [choice],
            "started_at": at,
        },
        {**same, "type": "session_closed", "at": at + 1.0},
    ]
    return [(name, orjson.dumps(event)) for event in events]


class World:
    def __init__(self, broker: EmbeddedKafka, prefix: str) -> None:
        self.address = {"bootstrap_servers": broker.bootstrap_servers, "prefix": prefix, "partitions": 2, "poll_ms": 20}
        self.settings = ServiceSettings.model_validate(self.address)
        self.builder = build_builder(BuilderSettings.model_validate(self.address)).stages
        merger = RewardMergerSettings.model_validate(self.address)
        self.merger = build_merger(merger).stages
        self.bad_merger: tuple[Processor[Any, Any], ...] = (BadDeploy(partitions=2, windows=merger.windows),)
        self.batcher = build_batcher(BatcherSettings.model_validate(self.address)).stages

    async def dlq(self, *arguments: str) -> str:
        """The command line, as an operator types it."""
        address = ("--bootstrap-servers", self.settings.bootstrap_servers, "--prefix", self.settings.prefix)
        runner = CliRunner(env={"ROLLMILL_PARTITIONS": "2"})
        result = await asyncio.to_thread(runner.invoke, app, ["dlq", *arguments, *address])
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    async def balance_when(self, reached: Callable[[Balance], bool]) -> Balance:
        """Whatever is on the way, every look must balance."""
        async with asyncio.timeout(60):
            while True:
                found = await read_balance(self.settings)
                assert found.balanced, found.as_json()
                if reached(found):
                    return found


@pytest.fixture
async def world(kafka_broker: EmbeddedKafka, topic_prefix: str) -> World:
    made = World(kafka_broker, topic_prefix)
    await apply_topics(made.settings)
    return made


async def test_after_the_fix_a_letter_is_driven_again_and_every_token_counts_once(world: World) -> None:
    await produce(world.settings, COMPLETIONS, [*session("good"), *session("bad"), ("good", b"{")])
    async with running(world.settings, (*world.builder, *world.bad_merger)):
        await read(world.settings, DEAD_LETTERS, 2)
    dead = (await world.balance_when(lambda balance: balance.total.captured == 2 * TOKENS)).total
    assert (dict(dead.dead_lettered), dead.pending) == ({"stage_error": TOKENS}, TOKENS)

    listed = [json.loads(line) for line in (await world.dlq("list", "--json")).splitlines()]
    assert sorted(letter["reason"] for letter in listed) == ["malformed", "stage_error"]
    (number,) = (letter["number"] for letter in listed if letter["reason"] == "stage_error")
    assert json.loads(await world.dlq("show", number, "--json"))["payload"]["value"]["session_id"] == "bad"
    assert f"would replay: {number}" in await world.dlq("replay", "--reason", "stage_error", "--dry-run")
    assert len(await read(world.settings, BUILT, 2)) == 2
    await world.dlq("drop", "--reason", "malformed", "--why", "a test client wrote it", "--by", "ada")
    assert (await world.dlq("replay", number)).startswith(f"replayed: {number} (stage_error), from built/")

    async with running(world.settings, (*world.builder, *world.merger)):
        await read(world.settings, TRAJECTORIES, 2)
        again = (await world.balance_when(lambda balance: not balance.total.dead_lettered)).total
        assert (again.captured, again.pending) == (2 * TOKENS, 2 * TOKENS)
        assert "was replayed already" in await world.dlq("replay", number)
        assert await world.dlq("replay", "--all") == "no dead letters\n"
        assert len(await read(world.settings, BUILT, 3)) == 3
        assert len(await read(world.settings, TRAJECTORIES, 2)) == 2

    async with running(world.settings, world.batcher):
        end = (await world.balance_when(lambda balance: not balance.total.pending)).total
    assert (end.captured, end.excluded.total(), end.doubled) == (2 * TOKENS, 2 * TOKENS, 0)
    letters = await read_letters(world.settings)
    assert sorted(str(letter.state) for letter in letters.values()) == ["dropped", "replayed"]


async def test_a_letter_that_dies_again_is_another_letter(world: World) -> None:
    await produce(world.settings, COMPLETIONS, session("bad"))
    async with running(world.settings, (*world.builder, *world.bad_merger)):
        await read(world.settings, DEAD_LETTERS, 1)
        (first,) = await read_letters(world.settings)
        async with open_manager(world.settings, ManualClock(), "ada") as desk:
            assert await desk.replay(first) is None
        await read(world.settings, DEAD_LETTERS, 3)
    _, second = await read_letters(world.settings)
    assert second.partition == first.partition
    found = (await read_balance(world.settings)).total
    assert (found.captured, dict(found.dead_lettered), found.doubled) == (TOKENS, {"stage_error": TOKENS}, 0)


async def test_the_newest_desk_is_the_only_one(world: World) -> None:
    await produce(world.settings, COMPLETIONS, [("s", b"{"), ("s", b"[")])
    async with running(world.settings, world.builder):
        await read(world.settings, DEAD_LETTERS, 2)
    first, second = await read_letters(world.settings)
    async with open_manager(world.settings, ManualClock(), "ada") as old:
        async with open_manager(world.settings, ManualClock(), "bob") as new:
            assert await new.drop(first, "no use") is None
            with pytest.raises(FencedError):
                await old.drop(second, "no use")
        states = [str(letter.state) for letter in (await read_letters(world.settings)).values()]
    assert states == ["dropped", "open"]
    assert isinstance(first, LetterNumber)


async def test_f12_what_is_sent_again_after_the_late_window_is_set_aside_and_every_token_counts_once(
    world: World,
) -> None:
    short = {**world.address, "late_window_seconds": 10.0, "timer_seconds": 0.02}
    builder = build_builder(BuilderSettings.model_validate(short)).stages
    twice = [*session("x-1", 1000.0), *session("x-2", 1000.0)]
    async with running(world.settings, (*builder, *world.merger)):
        await produce(world.settings, COMPLETIONS, twice)
        await read(world.settings, BUILT, 2)
        for number in range(8):  # ends of sessions in both partitions are the builder's time
            await produce(world.settings, COMPLETIONS, session(f"later-{number}", 1020.0))
            await read(world.settings, BUILT, 3 + number)
        await produce(world.settings, COMPLETIONS, twice)
        await read(world.settings, DEAD_LETTERS, 6)
        await produce(world.settings, COMPLETIONS, session("last", 1020.0))
        await read(world.settings, TRAJECTORIES, 11)
    total = (await world.balance_when(lambda balance: balance.total.captured == 11 * TOKENS)).total
    assert (total.pending, total.doubled, total.dead_lettered.total()) == (11 * TOKENS, 0, 0)
    assert len(await read(world.settings, BUILT, 11)) == 11
    assert (await world.dlq("replay", "--all")).count("is too old: its session may have been trained") == 6
    letters = await read_letters(world.settings)
    assert [(letter.info.reason, str(letter.state)) for letter in letters.values()] == [("too_old", "open")] * 6
