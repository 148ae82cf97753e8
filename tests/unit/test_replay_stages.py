"""A replay finds the services' stages by entry points, and says what to install where one is missing."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.ops.replay import stages
from rollmill.settings import KafkaSettings, ServiceSettings, programs

INTO = KafkaSettings.model_construct(prefix="new.")
SERVICES = ("builder", "reward-merger", "batcher")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]


def install(monkeypatch: pytest.MonkeyPatch, points: dict[str, dict[str, str]]) -> None:
    """The installed metadata may be those of another version of the project."""

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [EntryPoint(key, value, group) for key, value in points.get(group, {}).items() if name in (None, key)]

    monkeypatch.setattr(stages, "entry_points", entry_points)
    monkeypatch.setattr(programs, "entry_points", entry_points)


def test_every_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PROJECT)
    for service in SERVICES:
        settings = stages.settings_of(service, INTO, {"max_staleness": 7})
        assert (settings.prefix, settings.dead_letter_limit) == ("new.", stages.NO_LIMIT)
        assert stages.stage_of(service, settings).name
    grader = stages.grader_of("evaluator", stages.settings_of("evaluator", INTO, {"evaluator_concurrency": 5}))
    assert grader.concurrency == 5


def test_a_run_whose_trainer_reads_trajectories_is_replayed_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PROJECT)
    into = KafkaSettings.model_construct(prefix="new.", hand_over="trajectories")
    assert stages.stage_of("batcher", stages.settings_of("batcher", into, {})).name == "batcher"


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PROJECT)
    stages.check_options({"max_staleness": 7, "evaluator_concurrency": 5}, (*SERVICES, "evaluator"))
    with pytest.raises(InvalidInputError, match="no stage has the setting nonsense"):
        stages.check_options({"nonsense": 1}, SERVICES)
    with pytest.raises(InvalidInputError, match="settings of the batcher: max_staleness"):
        stages.settings_of("batcher", INTO, {"max_staleness": "many"})


def test_a_missing_service_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    with pytest.raises(ConfigurationError, match="no service 'builder' is installed: there is none"):
        stages.settings_of("builder", INTO, {})
    install(monkeypatch, {programs.GROUP: {"builder": "rollmill_nowhere.settings:Settings"}})
    with pytest.raises(ConfigurationError, match=r"no module 'rollmill_nowhere'\): pip install 'rollmill\[services\]'"):
        stages.settings_of("builder", INTO, {})
    install(monkeypatch, {stages.STAGES: {"builder": "rollmill_nowhere.app:build"}})
    with pytest.raises(
        ConfigurationError, match=r"the builder cannot be loaded \(No module named 'rollmill_nowhere'\)"
    ):
        stages.stage_of("builder", ServiceSettings())
