"""The floors drawn in docs/architecture.md are those that import-linter checks, and every package is on one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "shared" / "rollmill"
FLOORS = "Imports only go down the floors of the house"
DOMAIN = "What services decide, translate and grade by knows nothing of the runtime"
DIVIDED = ("ops", "runtime")
"""Packages of `rollmill` whose members are on different floors."""


def section() -> str:
    document = (ROOT / "docs" / "architecture.md").read_text()
    return document.partition("## The floors of the house")[2].partition("\n## ")[0]


def drawn() -> list[set[str]]:
    """Modules by floor, the highest first."""
    floors: list[set[str]] = []
    for line in section().partition("```text\n")[2].partition("```")[0].splitlines():
        number, module = re.fullmatch(r"([ \d]{2})  (rollmill[\w.]*)( .*)?", line, re.ASCII).group(1, 2)  # type: ignore[union-attr]  # a line of another form fails here
        if number.strip():
            floors.append(set())
            assert 14 - len(floors) + 1 == int(number)
        floors[-1].add(module)
    return floors


def contract(name: str) -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (found,) = [item for item in project["tool"]["importlinter"]["contracts"] if item["name"] == name]
    return dict(found)


def test_the_floors_that_are_drawn_are_those_that_are_checked() -> None:
    assert drawn() == [{module.strip() for module in layer.split("|")} for layer in contract(FLOORS)["layers"]]


def members(directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            yield path.stem


def test_every_package_is_on_a_floor() -> None:
    shared = {f"rollmill.{name}" for name in members(SHARED)} - {f"rollmill.{name}" for name in (*DIVIDED, "__init__")}
    divided = {f"rollmill.{package}.{name}" for package in DIVIDED for name in members(SHARED / package)}
    inits = {f"rollmill.{package}.__init__" for package in DIVIDED}
    services = {path.name for path in (ROOT / "services").glob("*/rollmill_*")}
    assert set().union(*drawn()) == shared | divided - inits | services


@pytest.mark.parametrize("module", contract(DOMAIN)["source_modules"])
def test_the_page_names_what_knows_nothing_of_the_runtime(module: str) -> None:
    assert f"`{module.partition('.')[2]}`" in section()
