"""`rollmill up` answers mistakes before anything starts, in one line (A3, B7, B8, B9)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.cli.up.progress import Counted
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.supervisor.supervisor import error_of


def up(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"--upstream": "http://127.0.0.1:1", "--port": str(free_port()), "--kafka-port": str(free_port())}
    given |= {"--data-dir": str(directory / "data"), **dict(zip(options[::2], options[1::2], strict=True))}
    command = [sys.executable, "-m", "rollmill.cli", "up", *(part for option in given.items() for part in option)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def refused(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal, before Kafka was started."""
    assert (ended.returncode, ended.stdout) == (70, "")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a3_a_bad_setting_of_any_service_is_found_before_kafka_starts(tmp_path: Path) -> None:
    line = refused(up(tmp_path, ROLLMILL_MAX_STALENESS="-3", ROLLMILL_EVALUATOR_SECONDS="soon"))
    assert "ROLLMILL_MAX_STALENESS=-3: input should be greater than or equal to 0" in line
    assert "ROLLMILL_EVALUATOR_SECONDS=soon: input should be a valid number" in line


@pytest.mark.parametrize("option", ["--port", "--kafka-port", "--health-port"])
def test_b8_a_taken_port_is_named_with_its_option(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        port = str(server.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is taken: choose another one with {option}" in refused(
            up(tmp_path, option, port)
        )


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://engine", "http://"])
def test_b7_an_upstream_without_a_scheme_is_refused(url: str, tmp_path: Path) -> None:
    assert f"--upstream {url} is no URL" in refused(up(tmp_path, "--upstream", url))


def test_b9_a_data_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        assert f"--data-dir {tmp_path / path} cannot be used" in refused(
            up(tmp_path, "--data-dir", str(tmp_path / path))
        )


def test_b5_records_are_counted_and_not_the_markers_of_transactions() -> None:
    counted = Counted()
    counted.take(
        "builder",
        'rollmill_stage_events_total{component="builder",event="sessions_closed",prefix="r."} 106.0\n'
        'rollmill_dead_letters_total{component="builder",prefix="r.",reason="invalid"} 2.0\n',
    )
    counted.take("batcher", 'rollmill_stage_events_total{component="batcher",event="steps",prefix="r."} 3.0\n')
    counted.take("capture", 'rollmill_engine_ids{upstream="http://e",engine="auto"} 0.0\n')
    numbers, engine = counted.lines()
    assert "sessions ended 106" in numbers
    assert numbers.endswith("steps 3, dead letters 2")
    assert engine.startswith("engine http://e: reports NO token ids")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"event": "the service stops", "error": "unknown strategy", "level": "error"}', "unknown strategy"),
        ("rollmill: ROLLMILL_PORT=x: no number", "ROLLMILL_PORT=x: no number"),
        ('{"event": "service drained", "level": "info"}', None),
        ("[1]", None),
        ("", None),
    ],
)
def test_a_service_that_ended_is_explained_by_its_last_error(line: str, error: str | None) -> None:
    assert error_of(line) == error
