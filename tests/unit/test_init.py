"""`rollmill init` writes a project, and never over one."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from rollmill.cli.init import write_project
from rollmill.errors import InvalidInputError


def test_a_project_has_an_agent_a_grader_a_trainer_and_settings(tmp_path: Path) -> None:
    names = {path.name for path in write_project(tmp_path / "my-run")}
    assert names == {"README.md", "grader.py", "rollmill.toml", "rollouts.py", "trainer.py"}
    settings = tomllib.loads((tmp_path / "my-run" / "rollmill.toml").read_text())
    assert settings["prefix"] == "my-run."
    for path in (tmp_path / "my-run").glob("*.py"):
        ast.parse(path.read_text())


def test_nothing_is_written_over_a_file_or_under_a_name_that_no_topic_can_have(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "trainer.py").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"has trainer\.py already"):
        write_project(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["trainer.py"]
    with pytest.raises(InvalidInputError, match="cannot begin the names of topics"):
        write_project(tmp_path / "my run")
