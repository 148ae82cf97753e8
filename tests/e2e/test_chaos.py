"""One short seed of the chaos harness, and one mutation that it has to find; nothing of it goes on afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
SECONDS = 300
"""A seed takes a minute on an idle machine; a busy one is no fault."""


def chaos(*arguments: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "chaos", *arguments)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]], str]:
    with chaos(*arguments) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, lines(out), err


def test_a_short_storm_loses_and_doubles_nothing() -> None:
    code, (summary,), err = run(
        ["--seeds", "1", "--first", "4", "--faults", "4", "--kinds", "broker_kill", "--pause", "1"]
    )
    (seed,) = lines(err)
    assert code == 0, err
    assert seed["faults"] == {"broker_kill": 1, "failpoint": 2, "kill": 1}
    assert (seed["lost"], seed["doubled"], seed["wrong"]) == (0, 0, [])
    assert seed["tokens"] == seed["trained"] + sum(seed["excluded"].values()) > 0
    assert seed["batches_recomputed"] > 0
    assert {name for name, times in seed["recovery"].items() if times["count"]} >= {"capture", "batcher", "trainer"}
    assert summary["ledger_balanced"]
    assert summary["recovery_p95_s"] > 0


def test_a_stage_without_its_changelog_is_found_out() -> None:
    code, (found,), err = run(["--mutations", "no-changelog"])
    assert code == 0, err
    assert found["found"]
    assert found["lost"] + found["doubled"] > 0
    assert not found["ledger_balanced"]


def descendants(pid: int) -> set[int]:
    """Processes that this one started, and theirs."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def eventually(true: Callable[[], bool]) -> bool:
    """Other processes' ends are no event here."""
    end = time.monotonic() + SECONDS
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_harness_ends_all_that_it_started(number: signal.Signals, tmp_path: Path) -> None:
    with chaos("--seeds", "1", "--data-dir", str(tmp_path)) as process:
        log = tmp_path / "seed-1" / "trainer.log"
        assert eventually(lambda: log.exists() or process.poll() is not None)
        started = descendants(process.pid)
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
    assert len(started) >= 8
    assert eventually(lambda: not any(map(is_alive, started)))
