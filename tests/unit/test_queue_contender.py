"""The benchmark beside TransferQueue says why it has no number, instead of failing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import queue_contender


def test_an_environment_that_cannot_be_made_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(queue_contender, "ROOT", tmp_path)
    monkeypatch.setattr(queue_contender, "VENV", tmp_path / ".rollmill" / "bench-venv")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    reason = "TransferQueue does not install: no word, exit code 1"
    assert queue_contender.transfer_queue([100]) == {"seconds": None, "reason": reason}
