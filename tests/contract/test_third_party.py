"""Every package that an extra installs is in THIRD-PARTY.md with its licence; the workflows are valid."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0].lower()


def test_every_package_that_is_installed_has_its_licence_named() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(item for name, items in extras.items() if name != "dev" for item in items)]
    table = re.findall(r"^\| ([a-z0-9-]+) \| .+ \|$", (ROOT / "THIRD-PARTY.md").read_text(), re.MULTILINE)
    assert sorted(set(map(name_of, asked)) - {"rollmill"}) == sorted(set(table) - {"package"})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_a_time_limit_where_it_runs_our_code(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["runs-on"] == "ubuntu-latest" for job in workflow["jobs"].values())


def test_the_version_is_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    shown = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", "version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == citation["version"]
