"""Builder and evaluator as processes: strategies that call ``sys.exit()`` end their sessions, and the services live."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollmill.codec import JSON, decode, encode
from rollmill.errors import EXIT_FATAL
from rollmill.models import (
    Evaluation,
    EvaluatorSpec,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    StrategySpec,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.strategies.allow_list import SETTING
from rollmill.testing.processes import service_process
from rollmill.testing.samples.sessions import completion, user
from rollmill.testing.topic_log import dead_letter_info, produce, read
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, EVALUATIONS
from rollmill_builder.settings import BuilderSettings

pytestmark = pytest.mark.kafka

PROGRAMS = Path(__file__).parents[1] / "programs"
LEAVES = "leaving_strategies:LeavingEvaluator"

GRADERS = (
    EvaluatorSpec(strategy="session_completed"),
    *(EvaluatorSpec(strategy=LEAVES, name=at, config={"at": at}) for at in ("init", "evaluate", "task")),
    EvaluatorSpec(strategy="leaving_at_import:Evaluator", name="import"),
    EvaluatorSpec(strategy="unittest.__main__:Evaluator", name="unlisted"),
)
SPECS = {
    "import": SessionSpec(builder=StrategySpec(strategy="leaving_at_import:Builder")),
    "unlisted": SessionSpec(builder=StrategySpec(strategy="unittest.__main__:Builder")),
    "build": SessionSpec(builder=StrategySpec(strategy="leaving_strategies:LeavingBuilder")),
    "good": SessionSpec(evaluators=GRADERS),
}


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> BuilderSettings:
    made = BuilderSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=1, session_timeout_ms=6000
    )
    await apply_topics(made)
    return made


async def test_f3_services_outlive_strategies_that_exit(settings: BuilderSettings) -> None:
    environment = environment_of(settings)
    async with (
        service_process("rollmill_builder", environment) as builder,
        service_process("rollmill_evaluator", environment) as evaluator,
    ):
        await produce(settings, COMPLETIONS, [(event.session_id, encode(event, JSON)) for event in events()])
        letters = await read(settings, DEAD_LETTERS, 2)
        built = await read(settings, BUILT, 4)
        graded = await read(settings, EVALUATIONS, len(GRADERS))
        assert await builder.stop() == 0
        assert await evaluator.stop() == 0
    infos = [dead_letter_info(letter) for letter in letters]
    assert [info.reason for info in infos] == ["unknown_strategy", "unknown_strategy"]
    assert ["SystemExit" in info.error for info in infos] == [True, False]
    assert SETTING in infos[1].error
    trajectories = {found.session_id: found for found in (decoded(Trajectory, record) for record in built)}
    assert trajectories["build"].status is TrajectoryStatus.ERROR
    assert "SystemExit" in (trajectories["build"].error or "")
    assert len(trajectories["good"].traces) == 1
    reasons = {found.evaluator: found.not_graded for found in (decoded(Evaluation, record) for record in graded)}
    assert reasons == {"session_completed": None} | dict.fromkeys(
        ("init", "evaluate", "task", "import", "unlisted"), "evaluator_error"
    )


@pytest.mark.parametrize("ends_by", ["return", "callback"])
async def test_f3_a_service_that_ends_without_a_stop_request_ends_with_70(
    settings: BuilderSettings, ends_by: str
) -> None:
    environment = {**environment_of(settings), "ENDS_BY": ends_by}
    async with service_process("ending_service", environment) as service:
        await service.wait_for_log(b"without a stop request")
        assert await asyncio.wait_for(service.process.wait(), 60) == EXIT_FATAL


def environment_of(settings: BuilderSettings) -> Mapping[str, str]:
    return {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": "1",
        "ROLLMILL_SESSION_TIMEOUT_MS": str(settings.session_timeout_ms),
        "PYTHONPATH": os.pathsep.join((str(PROGRAMS), os.environ.get("PYTHONPATH", ""))),
        SETTING: "leaving_strategies,leaving_at_import",
    }


def events() -> list[Any]:
    found: list[Any] = []
    for name, spec in SPECS.items():
        found += (
            SessionOpened(session_id=name, at=0.0, spec=spec),
            completion(f"{name}-c", [1, 2], [5, 6], at=1.0, messages=[user("?")]).replace(session_id=name),
            SessionClosed(session_id=name, at=2.0, status=SessionStatus.COMPLETED),
        )
    return found


def decoded(model: Any, record: Any) -> Any:
    return decode(model, record.value, tuple(record.headers))
