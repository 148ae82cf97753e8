"""The demo from end to end: honest it passes its own checks, and with any one thing spoiled it does not."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.sabotage import Sabotage
from rollmill.runtime.kafka.embedded import EmbeddedKafka

pytestmark = [pytest.mark.e2e, pytest.mark.kafka]

ROOT = Path(__file__).parents[2]
SECONDS = 300

NOTICED_BY = {
    Sabotage.SHIFT_LOGPROBS: "logprob_gap_max",
    Sabotage.SHIFT_MASK: "oracle_mismatches: label",
    Sabotage.SHIFT_LABELS: "logprob_gap_max",
    Sabotage.DROP_END_OF_TURN: "oracle_mismatches: ids",
    Sabotage.SWAP_GROUPS: "oracle_mismatches: advantage",
    Sabotage.SWAP_REWARDS: "oracle_mismatches: advantage",
}
ALL = "ROLLMILL_ALL_SABOTAGES" in os.environ
TRIED = tuple(NOTICED_BY) if ALL else (Sabotage.SHIFT_LABELS, Sabotage.SWAP_REWARDS)
"""One of each check, the gap of log-probs and the oracle: half a minute each. ``make demo-sabotage`` tries all."""


@dataclass(frozen=True)
class Demo:
    exit_code: int
    report: dict[str, Any]
    complaints: str


def demo(kafka: EmbeddedKafka, *options: str) -> Demo:
    """One run; its result is the one line on standard output."""
    command = (sys.executable, "-m", "relay", "--json", "--min-rise", "0", *options)
    done = subprocess.run(
        (*command, "--bootstrap-servers", kafka.bootstrap_servers),
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    return Demo(done.returncode, json.loads(lines[0]), done.stderr)


def test_an_honest_run_passes_every_check(kafka_broker: EmbeddedKafka) -> None:
    run = demo(kafka_broker, "--steps", "6")
    assert run.exit_code == 0, run.complaints
    report = run.report
    excluded = sum(report["tokens_excluded"].values())
    assert report["tokens_excluded"]["stale"] > 0
    assert (report["tokens_lost"], report["tokens_doubled"], report["tokens_pending"]) == (0, 0, 0)
    assert report["tokens_captured"] == report["tokens_trained"] + excluded + report["tokens_dead_lettered"]
    assert report["tokens_captured"] == report["tokens_read"]
    assert report["logprob_gap_max"] < 1e-3
    assert report["logprob_gap_tokens"] == report["tokens_trained"] > 0
    assert report["oracle_mismatches"] == 0
    assert report["policy_version"] == report["steps"] >= 6
    assert report["sessions"] % 8 == 0


@pytest.mark.parametrize("sabotage", TRIED)
def test_whatever_is_spoiled_is_noticed(kafka_broker: EmbeddedKafka, sabotage: Sabotage) -> None:
    # A label can only be off by one where a second version has sampled.
    steps = "2" if sabotage is Sabotage.SHIFT_LABELS else "1"
    run = demo(kafka_broker, "--steps", steps, "--sabotage", sabotage.value)
    assert run.exit_code == 1
    assert f"FAILED {NOTICED_BY[sabotage]}" in run.complaints


def test_every_sabotage_has_its_check() -> None:
    assert set(NOTICED_BY) == set(Sabotage) - {Sabotage.NONE}
