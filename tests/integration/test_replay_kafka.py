"""A run's log read again with other rules: what changes is what the rules change, and the live run is not touched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rollmill.cli.commands import app
from rollmill.codec import JSON, encode
from rollmill.errors import InvalidInputError
from rollmill.models import (
    BatchHeader,
    Disposition,
    EvaluatorSpec,
    PolicyAnnouncement,
    PolicyVersion,
    StepAcknowledged,
    StrategySpec,
    outcome,
)
from rollmill.ops.ledger import read_balance
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.ops.replay import Plan, replay
from rollmill.ops.replay.plan import settings_into
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.log_reader import KafkaRecord, Log
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.testing.topic_log import produce, read, running
from rollmill.topics import (
    ACKS,
    BATCHES,
    COMPLETIONS,
    CUTS,
    EVALUATIONS,
    OUTCOMES,
    POLICIES,
    REGISTRY,
    TRAJECTORIES,
    Topic,
)
from rollmill_batcher.app import build as build_batcher
from rollmill_batcher.settings import BatcherSettings
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka

GROUPS, MEMBERS, TOKENS = 4, 2, 3
SESSIONS = GROUPS * MEMBERS
CAPTURED = SESSIONS * 2 * TOKENS
SAMPLED_BY = (0, 1, 0, 3)
"""Policy version of each group; version i is announced just before group i ends, so group 2 is two versions old."""
OPTIONS = {"groups_per_step": 1}


def ended(group: int) -> float:
    return 100.0 + 10.0 * group


def session(group: int, member: int) -> list[tuple[str, bytes]]:
    """Two calls, the second of which goes on where the first one ended."""
    name, end, version = f"g{group}-m{member}", ended(group), [0, SAMPLED_BY[group]]
    same = {"session_id": name}
    spec = {"group_id": f"g{group}", "group_size": MEMBERS, "evaluators": [{"strategy": "reported"}]}
    events: list[dict[str, Any]] = [{**same, "type": "session_opened", "at": end - 5, "spec": spec}]
    for number, prompt in enumerate(([1, 2], [1, 2, 7, 8, 9, 4])):
        choice = {"token_ids": [7, 8, 9], "logprobs": [-0.5] * TOKENS, "finish_reason": "stop"}
        call = {"completion_id": f"{name}-{number}", "started_at": end - 4 + number, "ended_at": end - 3.5 + number}
        policy = {"before": version, "after": version}
        events.append(
            {**same, **call, "type": "completion", "prompt_ids": prompt, "choices": [choice], "policy": policy}
        )
    return [(name, orjson.dumps(event)) for event in [*events, {**same, "type": "session_closed", "at": end}]]


def grade(group: int, member: int) -> tuple[str, bytes]:
    name = f"g{group}-m{member}"
    word = {"evaluation_id": f"e-{name}", "session_id": name, "evaluator": "reported", "at": ended(group) + 1}
    return name, orjson.dumps({**word, "outcome_reward": float(member)})


async def live_run(settings: ServiceSettings) -> None:
    """A whole run: real stages, and a trainer that finishes a step a second after the grades of its group."""
    members = [(group, member) for group in range(GROUPS) for member in range(MEMBERS)]
    announced = [PolicyAnnouncement(version=PolicyVersion(0, i), at=ended(i) - 6) for i in range(1, GROUPS)]
    await produce(settings, POLICIES, [("policy", encode(item, JSON)) for item in announced])
    await produce(settings, COMPLETIONS, [event for name in members for event in session(*name)])
    await produce(settings, EVALUATIONS, [grade(*name) for name in members])
    rules = {**settings.model_dump(), **OPTIONS, "max_staleness": None, "steps_ahead": GROUPS}
    stages = (
        *build_builder(BuilderSettings.model_validate(settings.model_dump())).stages,
        *build_merger(RewardMergerSettings.model_validate(settings.model_dump())).stages,
        *build_batcher(BatcherSettings.model_validate(rules)).stages,
    )
    async with running(settings, stages):
        batches = await read(settings, BATCHES, GROUPS)
    headers = sorted((batch_header(raw.value or b"") for raw in batches), key=lambda header: header.step)
    await produce(settings, OUTCOMES, [word for header in headers for word in trained(header)])
    await produce(settings, ACKS, [("0", encode(finished(header), JSON)) for header in headers])


def finished(header: BatchHeader) -> StepAcknowledged:
    same = {"run": "run", "rank": 0, "world_size": 1, "step": header.step, "batch_id": header.batch_id}
    return StepAcknowledged.model_validate({**same, "at": ended(header.step) + 2})


def trained(header: BatchHeader) -> list[tuple[str, bytes]]:
    words = [
        outcome(
            Disposition.TRAINED,
            stage="trainer",
            session_id=row.session_id,
            attempt=1,
            units=row.units,
            batch_id=header.batch_id,
        )
        for row in header.table
    ]
    return [(word.session_id, encode(word, JSON)) for word in words]


async def everything(settings: KafkaSettings, *topics: Topic) -> list[tuple[Any, ...]]:
    """All records, and where the topics end."""
    found: list[tuple[Any, ...]] = []
    async with Log.open(settings) as log:
        for topic in topics:
            found += sorted([_plain(topic, raw) async for raw in log.read(topic)])
            found.append((topic.name, *sorted((await log.positions()).items())))
    return found


def _plain(topic: Topic, raw: KafkaRecord) -> tuple[Any, ...]:
    return topic.name, raw.partition, raw.offset, raw.timestamp, raw.key, raw.value, raw.headers


async def groups_of(settings: KafkaSettings) -> set[str]:
    admin = KafkaClients(settings).admin()
    await admin.start()
    try:
        return {group[0] for group in await admin.list_consumer_groups()}
    finally:
        await admin.close()


@pytest.fixture
async def live(kafka_broker: EmbeddedKafka, topic_prefix: str) -> ServiceSettings:
    made = ServiceSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=2,
        batch_partitions=1,
        poll_ms=20,
    )
    await apply_topics(made)
    await live_run(made)
    return made


async def test_other_rules_into_another_prefix(live: ServiceSettings) -> None:
    before = await everything(live, *REGISTRY), await groups_of(live)
    plans = [
        Plan(
            live,
            settings_into(live, f"{live.prefix}{name}."),
            builder=StrategySpec(strategy="per_request"),
            options={**OPTIONS, "max_staleness": 0},
        )
        for name in ("first", "second")
    ]
    found = (await replay(plans[0])).as_json()
    assert (await everything(live, *REGISTRY), await groups_of(live)) == before
    was, became = found["live"], found["replay"]
    assert (found["sessions"], found["left_out"]) == (SESSIONS, 0)
    assert (was["traces"], became["traces"]) == (SESSIONS, 2 * SESSIONS)
    assert was["rewards"] == became["rewards"] == {"graded": SESSIONS, "mean": 0.5, "deviation": 0.5, "ungraded": {}}
    assert (was["tokens"]["trained"], was["tokens"]["drop_rate"]) == (CAPTURED, 0.0)
    assert became["tokens"]["excluded"] == {"stale": CAPTURED // GROUPS}
    assert (became["tokens"]["drop_rate"], became["tokens"]["pending"]) == (1 / GROUPS, 0)
    assert (was["steps"]["count"], became["steps"]["count"]) == (GROUPS, GROUPS - 1)
    assert became["steps"]["mean_staleness"] == 0.0
    assert was["tokens"]["balanced"]
    assert (await read_balance(plans[0].into)).balanced
    await _same_again(plans)
    with pytest.raises(InvalidInputError, match="has records already"):
        await replay(plans[0])


async def _same_again(plans: list[Plan]) -> None:
    """The same log and rules give the same records, at the same offsets; only Kafka's own clock differs."""
    await replay(plans[1])
    topics = (TRAJECTORIES, BATCHES, CUTS, OUTCOMES)
    first, second = [await everything(plan.into, *topics) for plan in plans]
    assert [(*item[:3], *item[4:]) for item in first] == [(*item[:3], *item[4:]) for item in second]


async def test_other_evaluators_and_a_part_of_the_log(live: ServiceSettings) -> None:
    into = settings_into(live, f"{live.prefix}graded.")
    graders = (EvaluatorSpec(strategy="session_completed"),)
    found = await replay(Plan(live, into, evaluators=graders, since=ended(1) - 5, options=OPTIONS))
    assert (found.sessions, found.left_out) == (SESSIONS - MEMBERS, MEMBERS)
    became = found.as_json()["replay"]
    assert became["rewards"]["mean"] == 1.0
    assert became["trajectories"] == SESSIONS - MEMBERS
    assert became["tokens"]["captured"] == CAPTURED - CAPTURED // GROUPS
    assert "drop rate" in found.table()


async def test_the_command_line_says_what_it_does_and_compares(live: ServiceSettings) -> None:
    runner = CliRunner(env={"ROLLMILL_PARTITIONS": "2", "ROLLMILL_BATCH_PARTITIONS": "1"})
    address = ("--bootstrap-servers", live.bootstrap_servers, "--prefix", live.prefix)
    rules = ("--max-staleness", "none", "--set", "groups_per_step=1", "--from-offset", "0:1000000,1:0", "--json")
    into = f"{live.prefix}offset."
    result = await asyncio.to_thread(runner.invoke, app, ["replay", "--into", into, *rules, *address])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0 < found["sessions"] < SESSIONS
    assert found["sessions"] + found["left_out"] == SESSIONS
    assert found["replay"]["tokens"]["balanced"]
    assert "batching" in result.stderr


async def test_a_plan_that_cannot_be_followed_is_refused(kafka_broker: EmbeddedKafka, topic_prefix: str) -> None:
    live = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix)
    into = settings_into(live, f"{topic_prefix}x.")
    with pytest.raises(InvalidInputError, match="unknown builder 'mergign'"):
        await replay(Plan(live, into, builder=StrategySpec(strategy="mergign")))
    with pytest.raises(InvalidInputError, match="unknown evaluator"):
        await replay(Plan(live, into, evaluators=(EvaluatorSpec(strategy="judge"),)))
    with pytest.raises(InvalidInputError, match="live prefix itself"):
        await replay(Plan(live, live))
    with pytest.raises(InvalidInputError, match="no stage has the setting max_stalenes"):
        await replay(Plan(live, into, options={"max_stalenes": 1}))
    with pytest.raises(InvalidInputError, match="max_staleness"):
        await replay(Plan(live, into, options={"max_staleness": "many"}))
    with pytest.raises(InvalidInputError, match="no prefix"):
        settings_into(live, "spaces are not allowed")
