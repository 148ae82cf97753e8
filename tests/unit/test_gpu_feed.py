"""The script that feeds a GPU runs without Kafka, and without a GPU says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollmill.testing.samples.recorded_messages import read_messages
from rollmill.trainer.layouts.safetensors_reader import read_batch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = (sys.executable, str(BENCHMARKS / script), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_recorded_batches_are_fed_to_the_device(tmp_path: Path) -> None:
    file = tmp_path / "batches.bin"
    assert "messages" in run("record_batches.py", str(file), "--traces", "12", "--micro-batch-tokens", "20000")
    messages = list(read_messages(file))
    assert len(messages) > 1
    assert sum(len(read_batch(message).trace_index) for message in messages) == 12
    last = run("gpu_feed.py", str(file), "--json", "--rounds", "1").splitlines()[-1]
    result = json.loads(last)
    assert result is None if not torch.cuda.is_available() else result["gb_per_s_from_messages"] > 0


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.bin"
    file.write_bytes(b"\x05\0\0\0\0\0\0\0abc")
    with pytest.raises(ValueError, match="ends within a message"):
        list(read_messages(file))
