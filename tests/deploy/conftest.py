"""Helm itself renders the chart, in this process; what comes out is read as plain objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

from deploy.chart_files import PROGRAMS
from rollmill.settings import KafkaSettings

CHART = Path(__file__).parents[2] / "charts" / "rollmill"

Objects = list[dict[str, Any]]
Render = Callable[[dict[str, Any]], Objects]
ReadSettings = Callable[[str, Mapping[str, str]], KafkaSettings]


@pytest.fixture(scope="session")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: Chart) -> Render:
    """Values to the objects that an installation would make. Values that the schema refuses raise HelmValuesError."""

    def rendered(values: dict[str, Any]) -> Objects:
        chart.validate_schema(values)
        texts = chart.render(values, name="mill", namespace="training")
        manifests = (text for name, text in texts.items() if name.endswith(".yaml"))
        return [each for text in manifests for each in yaml.safe_load_all(text) if each]

    return rendered


@pytest.fixture
def read_settings(monkeypatch: pytest.MonkeyPatch) -> ReadSettings:
    """What a service makes of an environment. ValueError: a variable is none of its settings, or the service refuses.

    Settings pass over variables that they do not know, so a typing error would never be seen otherwise.
    """

    def read(service: str, environment: Mapping[str, str]) -> KafkaSettings:
        model = PROGRAMS.get(service, KafkaSettings)
        ours = {name: value for name, value in environment.items() if name.startswith("ROLLMILL_")}
        unknown = sorted(name for name in ours if name.removeprefix("ROLLMILL_").lower() not in model.model_fields)
        if unknown:
            raise ValueError(f"{service} has no setting for {', '.join(unknown)}")
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("ROLLMILL_")]:
                patch.delenv(name)
            for name, value in ours.items():
                patch.setenv(name, value)
            return model()

    return read
