"""Values beyond the log's limit on Apache Kafka: whole through builder, reward-merger, restart and trainer."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import ConsumerRecord

from rollmill.cli.tail import follow
from rollmill.codec import MSGPACK, encode, read_manifest
from rollmill.models import CompletionRecord, SessionClosed, Trajectory
from rollmill.runtime.claim_check import BlobReference, ClaimCheck, is_reference
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.topic_log import dead_letter_info, produce, read, read_all, running
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, OUTCOMES, STATE_BUILDER, TRAJECTORIES, Topic
from rollmill.trainer import TrajectoryStream
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka

MIB = 2**20
PACKED = (("content-type", MSGPACK.encode()),)


@pytest.fixture
def options(kafka_broker: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "bootstrap_servers": kafka_broker.bootstrap_servers,
        "prefix": topic_prefix,
        "partitions": 1,
        "poll_ms": 20,
        "claim_check_url": f"file://{tmp_path}/store",
        "claim_check_bytes": 100_000,
    }


def completion(name: str, tokens: int = 2, text: int = 0) -> bytes:
    choice = {"token_ids": list(range(tokens)), "logprobs": [-0.5] * tokens, "finish_reason": "stop"}
    request = orjson.dumps({"messages": [{"role": "user", "content": "x" * text}]})
    record = CompletionRecord.model_validate(
        {"session_id": "s", "completion_id": name, "prompt_ids": [1], "choices": [choice], "request": request}
    )
    return encode(record)


async def sent(settings: BuilderSettings, *values: bytes) -> list[bytes]:
    """As capture writes them; returns what the records hold."""
    claims = ClaimCheck.of(settings)
    checked = [await claims.store(COMPLETIONS, value) for value in values]
    await produce(settings, COMPLETIONS, [("s", value) for value in checked], headers=PACKED)
    return checked


CLOSED = encode(SessionClosed(session_id="s"))


def only(records: list[ConsumerRecord]) -> ConsumerRecord:
    (record,) = records
    return record


async def whole(settings: BuilderSettings, topic: Topic) -> Trajectory:
    record = only(await read(settings, topic, 1))
    assert is_reference(record.value)
    assert dict(record.headers)["content-type"] == MSGPACK.encode()
    found: Trajectory = await ClaimCheck.of(settings).read(topic, record.value, tuple(record.headers))
    manifest = read_manifest(tuple(record.headers))
    assert manifest is not None
    assert manifest.tokens == found.trained_tokens, "counted unread"
    return found


async def test_a_session_beyond_the_limit_comes_through_whole_over_a_restart(options: dict[str, Any]) -> None:
    settings = BuilderSettings.model_validate(options)
    await apply_topics(settings)
    tokens = 700_000
    (reference,) = await sent(settings, completion("c", tokens, text=9 * MIB))
    assert BlobReference.decode(reference).size > COMPLETIONS.max_bytes
    async with running(settings, build_builder(settings).stages):
        await read(settings, OUTCOMES, 1)
    state = [record for record in await read(settings, STATE_BUILDER, 1) if is_reference(record.value)]
    assert state, "the call's text is in the changelog by reference"
    await sent(settings, CLOSED)
    async with running(settings, build_builder(settings).stages):
        built = await whole(settings, BUILT)
    merger = RewardMergerSettings.model_validate(options)
    async with running(merger, build_merger(merger).stages):
        merged = await whole(settings, TRAJECTORIES)
    for trajectory in (built, merged):
        assert trajectory.trained_tokens == tokens
        assert trajectory.traces[0].response_ids[-1] == tokens - 1
    assert not await read_all(settings, DEAD_LETTERS)
    await _read_by_the_others(settings, tokens)


async def _read_by_the_others(settings: BuilderSettings, tokens: int) -> None:
    (line,) = [line async for line in follow(settings, BUILT, from_beginning=True, limit=1, full=False)]
    assert orjson.loads(line)["value"]["traces"][0]["response_ids"].endswith(f"{tokens} in all]")
    assert await asyncio.to_thread(_tokens_of_the_first, settings) == tokens
    swept = await asyncio.to_thread(_collected, settings)
    assert swept["referenced"] == swept["blobs"] > 3


def _collected(settings: BuilderSettings) -> dict[str, int]:
    names = ("bootstrap_servers", "prefix", "partitions", "claim_check_url")
    given = {f"ROLLMILL_{name.upper()}": str(getattr(settings, name)) for name in names}
    command = [sys.executable, "-m", "rollmill.cli", "blobs", "gc", "--json"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, int] = orjson.loads(done.stdout)
    return found


def _tokens_of_the_first(settings: BuilderSettings) -> int:
    with TrajectoryStream(settings=settings, record=False, timeout=30.0) as stream:
        return next(iter(stream.trajectories())).trajectory.trained_tokens


def _delete(path: Path) -> None:
    path.unlink()


def _corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(("harm", "reason"), [(_delete, "missing_blob"), (_corrupt, "corrupt_blob")])
async def test_a_harmed_blob_is_a_dead_letter_and_the_session_goes_on(
    options: dict[str, Any], tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    settings = BuilderSettings.model_validate(options)
    await apply_topics(settings)
    reference, _, _ = await sent(settings, completion("large", 30_000), completion("small"), CLOSED)
    (path,) = [found for found in (tmp_path / "store").rglob("*") if found.is_file()]
    harm(path)
    async with running(settings, build_builder(settings).stages):
        built = only(await read(settings, BUILT, 1))
        letter = only(await read(settings, DEAD_LETTERS, 1))
    info = dead_letter_info(letter)
    assert (info.reason, info.offset, letter.value) == (reason, 0, reference)
    trajectory: Trajectory = await ClaimCheck.of(settings).read(BUILT, built.value, tuple(built.headers))
    assert trajectory.trained_tokens == 2


class Watched(Metrics):
    """Says when a task has failed."""

    def __init__(self, service: str) -> None:
        super().__init__(service)
        self.failed = asyncio.Event()

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        super().count(name, amount, **labels)
        if name == "task_failures":
            self.failed.set()


async def test_a_storage_that_is_away_is_waited_for(options: dict[str, Any], tmp_path: Path) -> None:
    settings = BuilderSettings.model_validate(options)
    await apply_topics(settings)
    await sent(settings, completion("large", 30_000), CLOSED)
    (stage,) = build_builder(settings).stages
    store, aside = tmp_path / "store", tmp_path / "aside"
    metrics = Watched(stage.name)
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), metrics, Health())
    stop = asyncio.Event()
    job = asyncio.create_task(run_stages([stage], tools, stop))
    shutil.move(store, aside)
    await asyncio.wait_for(metrics.failed.wait(), 30)
    shutil.move(aside, store)
    assert (await whole(settings, BUILT)).trained_tokens == 30_000
    stop.set()
    await job
    assert not await read_all(settings, DEAD_LETTERS)
