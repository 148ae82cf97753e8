"""From a session's end to its reward through Kafka, for patches of every kind, on two repositories.

The builder, the evaluator and the reward-merger run as they do in production; the evaluator has to answer every
session, whatever the code of the others does to its sandboxes.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollmill.codec import decode
from rollmill.models import Evaluation, Trajectory
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients, faststream_broker
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies.sandbox import Sandbox
from rollmill.testing.samples.repositories import Repository
from rollmill.testing.topic_log import produce, read, running
from rollmill.topics import COMPLETIONS, EVALUATIONS, TRAJECTORIES
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_evaluator.sandbox.selection import SandboxOptions
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import work
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka

BROKEN = "def area(w, h):\n    return w + h\n\n\ndef edge(w, h):\n    return 2 * (w + h)\n"
FIXED = BROKEN.replace("w + h", "w * h", 1)
HANGING = "while True:\n    pass\n"
EATING = "kept = []\nwhile True:\n    kept.append(bytearray(2**24))\n"
NEW_FILES = {"shapes.py": "from planes import *\n", "planes.py": FIXED}
PYTEST = """\
import shapes


def test_area():
    assert shapes.area(2, 3) == 6


def test_edge():
    assert shapes.edge(2, 3) == 10
"""
UNITTEST = """\
import unittest

import shapes


class Shapes(unittest.TestCase):
    def test_area(self):
        self.assertEqual(shapes.area(2, 3), 6)

    def test_edge(self):
        self.assertEqual(shapes.edge(2, 3), 10)
"""
RESOURCES = {"test_seconds": 60, "memory_mib": 192, "disk_mib": 8, "processes": 32}
SUITES: dict[str, dict[str, Any]] = {
    "by-pytest": {
        "framework": "pytest",
        "test_command": [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
        "expected": {"fail_to_pass": ["tests/test_a.py::test_area"], "pass_to_pass": ["tests/test_a.py::test_edge"]},
    },
    "by-unittest": {
        "framework": "unittest",
        "test_command": [sys.executable, "-m", "unittest", "-v", "tests.test_a"],
        "expected": {
            "fail_to_pass": ["tests.test_a.Shapes.test_area"],
            "pass_to_pass": ["tests.test_a.Shapes.test_edge"],
        },
    },
}
SAID: dict[str, tuple[str, float]] = {
    "passes": ("graded", 1.0),
    "new-file": ("graded", 1.0),
    "fails": ("graded", 0.0),
    "eats-memory": ("graded", 0.0),
    "does-not-apply": ("failed_to_apply", 0.0),
    "empty": ("empty_patch", 0.0),
    "hangs": ("timed_out", 0.0),
}


def patches(repository: Repository) -> dict[str, str]:
    passing = repository.patch({"shapes.py": FIXED})
    return {
        "passes": passing,
        "new-file": repository.patch(NEW_FILES),
        "fails": repository.patch({"shapes.py": BROKEN.replace("w + h", "w - h", 1)}),
        "eats-memory": repository.patch({"shapes.py": EATING}),
        "does-not-apply": passing.replace("def edge", "def border"),
        "empty": "",
        "hangs": repository.patch({"shapes.py": HANGING}),
    }


def events(session: str, suite: str, patch: str) -> list[tuple[str, bytes]]:
    """One session of one call, closed with its patch."""
    config = {
        **SUITES[suite],
        "source": suite,
        "environment": {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ".", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        "resources": {**RESOURCES, **({"test_seconds": 1.5} if session.endswith("hangs") else {})},
        "protected": ["tests"],
    }
    spec = {"evaluators": [{"strategy": "test_on_output", "config": config}]}
    choice = {"token_ids": [7, 9], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    call = {"type": "completion", "completion_id": f"{session}-1", "prompt_ids": [1, 2], "choices": [choice]}
    closed = {"type": "session_closed", "output": {"patch": patch}}
    told = ({"type": "session_opened", "spec": spec}, call, closed)
    return [(session, orjson.dumps({"session_id": session, **event})) for event in told]


@asynccontextmanager
async def evaluating(settings: EvaluatorSettings) -> AsyncIterator[ServiceContext]:
    context = ServiceContext(
        settings=settings,
        clients=KafkaClients(settings),
        broker=faststream_broker(settings),
        clock=SystemClock(),
        stop=asyncio.Event(),
        metrics=Metrics("evaluator"),
        health=Health(),
    )
    await context.broker.start()
    job = asyncio.create_task(work(context))
    try:
        yield context
    finally:
        context.stop.set()
        await asyncio.wait_for(job, 60)
        await context.broker.stop()


@pytest.fixture
def repositories(public_path: Path) -> dict[str, Repository]:
    files = {"shapes.py": BROKEN, "tests/__init__.py": ""}
    return {
        suite: Repository.made(public_path / suite, {**files, "tests/test_a.py": tests})
        for suite, tests in (("by-pytest", PYTEST), ("by-unittest", UNITTEST))
    }


async def test_every_kind_of_patch_gets_its_verdict_and_reward(
    kafka_broker: EmbeddedKafka,
    topic_prefix: str,
    sandbox: Sandbox,  # noqa: ARG001  # skips with the reason where there is none
    sandbox_options: SandboxOptions,
    repositories: dict[str, Repository],
    public_path: Path,
) -> None:
    address = {"bootstrap_servers": kafka_broker.bootstrap_servers, "prefix": topic_prefix, "partitions": 2}
    settings = EvaluatorSettings.model_validate(
        {
            **address,
            "evaluator_sources": public_path,
            "sandbox_tools": sandbox_options.tools,
            "sandbox_uid": sandbox_options.uid,
        }
    )
    await apply_topics(settings)
    builder, merger = BuilderSettings.model_validate(address), RewardMergerSettings.model_validate(address)
    wanted = {f"{suite}.{name}": said for suite in SUITES for name, said in SAID.items()}
    for suite, repository in repositories.items():
        for name, patch in patches(repository).items():
            await produce(settings, COMPLETIONS, events(f"{suite}.{name}", suite, patch))
    async with (
        running(builder, build_builder(builder).stages),
        running(merger, build_merger(merger).stages),
        evaluating(settings),
    ):
        for count in (1, 5, 10):  # each has a minute: they are many for a busy machine
            await read(settings, EVALUATIONS, count)
        trajectories = await read(settings, TRAJECTORIES, len(wanted))
    said = [decode(Evaluation, record.value, tuple(record.headers)) for record in await read(settings, EVALUATIONS, 14)]
    assert {item.session_id: (item.verdict, item.outcome_reward) for item in said} == wanted
    assert len(said) == len(wanted)
    merged = [decode(Trajectory, record.value, tuple(record.headers)) for record in trajectories]
    assert {item.session_id: [trace.reward for trace in item.traces] for item in merged} == {
        session: [reward] for session, (_, reward) in wanted.items()
    }


async def test_an_evaluator_without_a_sandbox_starts_and_says_so(
    kafka_broker: EmbeddedKafka, topic_prefix: str, repositories: dict[str, Repository], public_path: Path
) -> None:
    address = {"bootstrap_servers": kafka_broker.bootstrap_servers, "prefix": topic_prefix, "partitions": 2}
    settings = EvaluatorSettings.model_validate(
        {**address, "evaluator_sources": public_path, "sandbox_bwrap": public_path / "no-such-program"}
    )
    await apply_topics(settings)
    builder = BuilderSettings.model_validate(address)
    patch = patches(repositories["by-pytest"])["passes"]
    await produce(settings, COMPLETIONS, events("s1", "by-pytest", patch))
    async with running(builder, build_builder(builder).stages), evaluating(settings) as context:
        records = await read(settings, EVALUATIONS, 1)
        assert context.health.readiness()[0] == 200
    said = decode(Evaluation, records[0].value, tuple(records[0].headers))
    assert (said.verdict, said.not_graded, said.outcome_reward) == ("not_graded", "sandbox_unavailable", None)
    assert "no-such-program does not work here" in said.metadata["error"]
