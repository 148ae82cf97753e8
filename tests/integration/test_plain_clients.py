"""Programs without our library take part: the README's own code, run as it is printed, against real services."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmill.ops.ledger import settled_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import Supervisor, kafka_environment, service_program
from rollmill.settings import KafkaSettings

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

README = Path(__file__).parents[2] / "README.md"
SERVICES = ("builder", "evaluator", "reward-merger")
SECONDS = 60


def example(name: str) -> str:
    """A code block of the README, by the name in the comment above it."""
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None, f"the README has no example {name}"
    return found.group(1)


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(settings)
    return settings


@pytest.fixture
async def services(settings: KafkaSettings, tmp_path: Path) -> AsyncIterator[Supervisor]:
    lines: list[str] = []
    async with Supervisor(tmp_path / "logs", environment=os.environ, report=lines.append) as supervisor:
        for service in SERVICES:
            await supervisor.start(service_program(service, kafka_environment(settings)))
        await supervisor.wait_ready()
        yield supervisor


async def output_of(script: Path, *arguments: str, settings: KafkaSettings) -> str:
    environment = {**os.environ, **kafka_environment(settings)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(script), *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0
    return out.decode()


async def test_json_in_and_msgpack_out_with_nothing_but_a_kafka_client(
    settings: KafkaSettings, services: Supervisor, tmp_path: Path
) -> None:
    for name in ("produce.py", "read.py"):
        (tmp_path / name).write_text(example(name))
    session = (await output_of(tmp_path / "produce.py", settings=settings)).strip()
    shown = await output_of(tmp_path / "read.py", session, settings=settings)
    assert shown in README.read_text(), "the README shows another output"
    assert shown.splitlines() == ["COMPLETED 1", "[7, 13] [1, 1] [-0.25, -0.0625] 1.0"]
    balance = await settled_balance(settings, timeout=0)
    assert balance.balanced
    assert (balance.total.captured, balance.total.pending) == (2, 2)
    assert services.starts("builder") == 1
