"""Habits of the project that scripts rely on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (targets,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert {"demo", "test", "check", "bench", "up", "schemas"} <= set(targets.split())
    for target in targets.split():
        assert re.search(rf"^  make {target} +\S", shown, re.MULTILINE), f"make {target} is not explained"


def test_ci_runs_the_check() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make --no-print-directory check")


def test_a_benchmark_ends_with_one_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks", "--json", "--only", "codec_formats"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    (line,) = shown.splitlines()
    document = json.loads(line)
    assert document["commit"]
    assert document["machine"]["cores"]
    rows = document["results"]["codec_formats"]
    assert rows["msgpack_packed"]["bytes"] < rows["json_lists"]["bytes"]


def test_kept_results_say_where_they_come_from() -> None:
    results = list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        document = json.loads(path.read_text())
        assert {"machine", "versions", "commit", "results"} <= set(document), path
        assert not document["commit"].endswith("+changes"), path


def test_links_in_the_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
