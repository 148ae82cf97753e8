"""What version 0.1.0 offered still exists and works (docs/api-stability.md).

The fixture was written by `list_public_api.py` from the wheel of that version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.contract.list_public_api import (
    PLAIN,
    commands,
    describe,
    environment_settings,
    metrics,
    public_names,
    topics,
)

ROOT = Path(__file__).parents[2]
OLD: dict[str, Any] = json.loads((ROOT / "tests" / "fixtures" / "public_api_0.1.0.json").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = [(module, name) for module, names in OLD["modules"].items() for name in names]
CHANGED_DEFAULTS: dict[str, Any] = {
    # Whoever opened sessions could make the evaluator send requests to whatever it reaches.
    "ROLLMILL_EVALUATOR_ANY_URL": {"default": False},
}
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OLD["settings"]["KafkaSettings"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_a_public_name_still_works(module: str, name: str) -> None:
    new = describe(getattr(import_module(module), name))
    old = OLD["modules"][module][name]
    assert new["kind"] == old["kind"]
    assert broken(old, new) == []


@pytest.mark.parametrize("module", OLD["modules"])
def test_whatever_a_module_lists_is_there(module: str) -> None:
    found = import_module(module)
    assert [name for name in public_names(found) if not hasattr(found, name)] == []


def broken(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a user of ``old`` would miss in ``new``."""
    missing = [f"parameter {complaint}" for complaint in _calls(old.get("parameters"), new.get("parameters"))]
    for name, parameters in old.get("attributes", {}).items():
        if name not in new["attributes"]:
            missing.append(f"attribute {name}")
        elif parameters is not None:
            missing += [f"{name}: {complaint}" for complaint in _calls(parameters, new["attributes"][name])]
    for name, value in old.get("members", {}).items():
        if name not in new["members"] or new["members"][name] != value:
            missing.append(f"member {name} = {value!r}")
    missing += [f"no longer a {base}" for base in old.get("catches", ()) if base not in new["catches"]]
    if isinstance(old.get("value"), PLAIN) and old.get("value") != new.get("value"):
        missing.append(f"value {old['value']!r}")
    return missing


def _calls(old: list[dict[str, Any]] | None, new: list[dict[str, Any]] | None) -> list[str]:
    """Parameters that are gone, at another position, or required now."""
    if old is None or new is None:
        return [] if old == new else ["is no callable any more"]
    names = {item["name"]: item for item in new}
    takes_any = any(item["kind"] == "VAR_KEYWORD" for item in new)
    gone = [item["name"] for item in old if item["name"] not in names and not takes_any]
    before = [item["name"] for item in old if item["kind"] in POSITIONAL]
    after = [item["name"] for item in new if item["kind"] in POSITIONAL]
    moved = [] if after[: len(before)] == before else [f"order {before} became {after}"]
    known = {item["name"]: item for item in old}
    required = [
        f"{name} is required"
        for name, item in names.items()
        if item["required"] and not item["kind"].startswith("VAR_") and not known.get(name, {}).get("required")
    ]
    return [*gone, *moved, *required]


def test_a_missing_parameter_is_found() -> None:
    def old(first: int, second: int = 0) -> None: ...
    def new(first: int, *, third: int) -> None: ...

    assert broken(describe(old), describe(new)) == [
        "parameter second",
        "parameter order ['first', 'second'] became ['first']",
        "parameter third is required",
    ]
    assert broken(describe(old), describe(old)) == []


def declared() -> dict[str, dict[str, str]]:
    return {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}


def test_entry_points_are_there() -> None:
    for group, names in OLD["entry_points"].items():
        assert set(names) <= set(declared()[group]), group


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, points in declared().items() for name in points])
def test_an_entry_point_can_be_loaded(group: str, name: str) -> None:
    module, _, attribute = declared()[group][name].partition(":")
    assert callable(getattr(import_module(module), attribute))


def test_settings_keep_names_and_defaults() -> None:
    found = environment_settings()
    for kind, variables in OLD["settings"].items():
        expected = {name: CHANGED_DEFAULTS.get(name, value) for name, value in variables.items()}
        assert {name: found[kind].get(name) for name in variables} == expected, kind


def test_commands_keep_arguments_and_flags() -> None:
    found = commands()
    for path, old in OLD["commands"].items():
        assert found[path]["arguments"] == old["arguments"], path
        assert set(old["flags"]) <= set(found[path]["flags"]), path


def test_metrics_keep_names_types_and_labels() -> None:
    found = metrics()
    for name, old in OLD["metrics"].items():
        assert (found[name]["type"], found[name]["labels"]) == (old["type"], old["labels"]), name
        assert set(old["components"]) <= set(found[name]["components"]), name


def test_topics_keep_names_and_formats() -> None:
    found = topics()
    assert {name: found.get(name) for name in OLD["topics"]} == OLD["topics"]


def test_the_trainer_is_imported_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import rollmill.trainer, rollmill.trainer.flux, rollmill.strategies"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
