"""What an exit code says to whoever keeps the process running."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.errors import KafkaConnectionError

from rollmill.errors import ConfigurationError, FatalError, FencedError, RetryableError
from rollmill.runtime.app import exit_code
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import KafkaSettings, ServiceSettings


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (FencedError("another owner"), 75),
        (FatalError("lost records"), 70),
        (ConfigurationError("topics differ"), 70),
        (KeyError("a bug"), 70),
        (RetryableError("not now"), 1),
        (KafkaConnectionError("no broker"), 1),
        (TimeoutError(), 1),
        (ConnectionResetError(), 1),
    ],
)
def test_only_what_may_pass_is_worth_another_start(failure: BaseException, code: int) -> None:
    assert exit_code(failure) == code


def test_a_join_must_outlast_the_session_of_a_dead_member() -> None:
    with pytest.raises(ValueError, match="at least 5000 below request_timeout_ms"):
        KafkaSettings(session_timeout_ms=18_000, request_timeout_ms=20_000)


async def test_a_service_without_stages_is_ended_by_its_workers_alone() -> None:
    settings = ServiceSettings()
    tools = TaskTools(settings, KafkaClients(settings), ManualClock(), Metrics("evaluator"), Health())
    stop = asyncio.Event()
    await run_stages([], tools, stop)
    assert not stop.is_set()
