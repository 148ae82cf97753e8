"""The Dockerfile, and what its containers start. There is no engine here: the steps are run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
START = ROOT / "deploy" / "start.sh"


def test_the_context_has_what_is_copied_and_little_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source.removeprefix("./").split("/")[0]
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
        for source in sources.split()
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_a_service_is_no_root_and_can_write_its_volumes() -> None:
    owned = re.search(r"install -d -o (\d+) -g (\d+) (.+)$", DOCKERFILE, re.MULTILINE)
    assert owned
    assert f"USER {owned[1]}:{owned[2]}" in DOCKERFILE
    assert {"/var/lib/rollmill/spool", "/var/lib/rollmill/spill"} <= set(owned[3].split())
    assert DOCKERFILE.index("USER ") > DOCKERFILE.rindex("RUN ")


@pytest.fixture
def container(tmp_path: Path) -> dict[str, str]:
    """An environment as in a container, whose Python does what ``child`` beside it says."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >"$(dirname "$0")/started"\n. "$(dirname "$0")/child"\n')
    (tmp_path / "python").chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SERVICE": "reward-merger", "FENCED_PAUSE_SECONDS": "0.2"}


def started(tmp_path: Path, environment: dict[str, str], child: str, *arguments: str) -> subprocess.Popen[bytes]:
    (tmp_path / "child").write_text(child)
    return subprocess.Popen([START, *arguments], env=environment, stdout=subprocess.PIPE)


def test_a_container_runs_its_service_and_ends_as_that_does(tmp_path: Path, container: dict[str, str]) -> None:
    with started(tmp_path, container, "exit 70") as process:
        assert process.wait(timeout=20) == 70
    assert (tmp_path / "started").read_text() == "-m rollmill_reward_merger\n"


def test_a_container_runs_a_command_instead(tmp_path: Path, container: dict[str, str]) -> None:
    with started(tmp_path, container, "exit 1", "echo", "two words") as process:
        assert process.communicate(timeout=20)[0] == b"two words\n"
    assert not (tmp_path / "started").exists()


def test_a_fenced_service_leaves_its_successor_alone(tmp_path: Path, container: dict[str, str]) -> None:
    began = time.monotonic()
    with started(tmp_path, container, "exit 75") as process:
        assert process.wait(timeout=20) == 75
    assert time.monotonic() - began >= 0.2


def test_a_stopped_container_waits_for_the_drain(tmp_path: Path, container: dict[str, str]) -> None:
    drains = 'trap "exit 3" TERM; echo ready; while :; do sleep 0.05; done'
    with started(tmp_path, container, drains) as process:
        terminate_after(process, b"ready\n")
        assert process.wait(timeout=20) == 3


def test_a_fenced_container_that_is_stopped_waits_no_more(tmp_path: Path, container: dict[str, str]) -> None:
    with started(
        tmp_path, {**container, "FENCED_PAUSE_SECONDS": "600"}, 'trap "" TERM; echo fenced; exit 75'
    ) as process:
        terminate_after(process, b"fenced\n")
        assert process.wait(timeout=20) == 75


def terminate_after(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout
    assert process.stdout.readline() == line
    process.send_signal(signal.SIGTERM)
