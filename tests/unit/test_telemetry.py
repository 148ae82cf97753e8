"""Health, metrics and logs as operators meet them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import structlog
from aiokafka.errors import ProducerFenced

from rollmill.runtime.telemetry.health import Health, HealthServer
from rollmill.runtime.telemetry.logging import Repeats, configure_logging, is_relevant
from rollmill.runtime.telemetry.metrics import Metrics


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("reward-merger")


@pytest.fixture
def server(health: Health, metrics: Metrics) -> Iterator[HealthServer]:
    made = HealthServer(health, metrics, "127.0.0.1", 0)
    made.start()
    yield made
    made.stop()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_waits_for_every_part_and_live_does_not(server: HealthServer, health: Health) -> None:
    assert get(server, "/ready")[0] == 503
    health.expect("builder.0")
    health.expect("builder.1")
    health.ready("builder.0")
    status, body = get(server, "/ready")
    assert (status, json.loads(body)["waiting"]) == (503, ["builder.1"])
    assert get(server, "/live")[0] == 200
    health.ready("builder.1")
    assert get(server, "/ready")[0] == 200


def test_a_failure_takes_live_and_ready_down(server: HealthServer, health: Health) -> None:
    health.ready("a")
    health.fail("fenced")
    assert get(server, "/live") == (503, '{"live":false,"why":"fenced"}')
    assert get(server, "/ready")[0] == 503


def test_metrics_are_scraped_with_component_and_prefix(server: HealthServer, metrics: Metrics) -> None:
    metrics.count("records", 3, topic="built")
    metrics.gauge("lag_records", 7, topic="built", partition="0")
    metrics.observe("transaction_seconds", 0.004)
    status, text = get(server, "/metrics")
    assert status == 200
    own = 'component="reward-merger"'
    assert f'rollmill_records_total{{{own},prefix="",topic="built"}} 3.0' in text
    assert f'rollmill_lag_records{{{own},partition="0",prefix="",topic="built"}} 7.0' in text
    assert f'rollmill_transaction_seconds_bucket{{{own},le="0.005",prefix=""}} 1.0' in text


def test_an_unknown_path_names_the_known_ones(server: HealthServer) -> None:
    assert get(server, "/nope") == (404, '{"error":"try /live, /ready or /metrics"}')


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.usefixtures("_logging_restored")
def test_logs_are_json_lines_with_context_and_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(service="builder", level="INFO", as_json=True)
    secrets = {"sasl_password": "hunter2", "session_token": "t", "Authorization": "Bearer x"}
    structlog.get_logger("rollmill.test").info("refused", task="builder.3", offset=17, tokens=5, **secrets)
    logging.getLogger("some.library").warning("plain %s", "text")
    ours, theirs = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["service"], ours["task"], ours["offset"]) == ("refused", "builder", "builder.3", 17)
    assert {ours[name] for name in secrets} == {"***"}
    assert ours["tokens"] == 5
    assert (theirs["event"], theirs["level"]) == ("plain text", "warning")


def said(text: object, *args: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("aiokafka", level, "file", 1, text, args, None)


def test_a_library_that_says_the_same_for_ever_is_heard_now_and_then_with_a_count() -> None:
    now = 0.0
    repeats = Repeats(most=2, seconds=10.0, now=lambda: now)
    passed = [repeats.filter(said("no answer from node %s", number)) for number in range(100)]
    assert passed == [True, True, *[False] * 98]
    now = 11.0
    record = said("no answer from node %s", 7)
    assert repeats.filter(record)
    assert record.getMessage() == "no answer from node 7 [98 more like this in 11 s]"
    assert [repeats.filter(said("no answer from node %s", 7)) for _ in range(2)] == [True, False]


def test_other_texts_levels_and_our_own_events_are_passed_on() -> None:
    repeats = Repeats(most=1, now=lambda: 0.0)
    assert repeats.filter(said("a"))
    assert repeats.filter(said("b"))
    assert repeats.filter(said("a", level=logging.WARNING))
    assert all(repeats.filter(said({"event": "a call was not recorded"})) for _ in range(10))


def test_texts_that_are_never_the_same_take_no_memory() -> None:
    repeats = Repeats()
    assert all(repeats.filter(said(f"number {number}")) for number in range(5000))
    assert len(repeats._seen) == 1000


@pytest.mark.parametrize(("error", "heard"), [(ProducerFenced(), False), (ValueError("a fault"), True)])
async def test_failures_that_aiokafka_keeps_to_itself_are_no_news(
    caplog: pytest.LogCaptureFixture, error: Exception, heard: bool
) -> None:
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        del future
        gc.collect()
    [record] = caplog.records
    assert is_relevant(record) is heard
