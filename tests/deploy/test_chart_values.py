"""What the chart accepts as values, and what it refuses before anything is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart
from helm_python.chart import lint
from helm_python.errors import HelmRenderError, HelmValuesError

from deploy.chart_files import CHART, topics_file, values_schema
from rollmill_evaluator.settings import EvaluatorSettings

MINIMAL = CHART / "ci" / "minimal-values.yaml"


def minimal(path: str = "", value: Any = None) -> dict[str, Any]:
    """The least that an installation says, and one value more."""
    values: dict[str, Any] = yaml.safe_load(MINIMAL.read_text())
    *outer, last = path.split("/")
    inner = values
    for name in outer:
        inner = inner.setdefault(name, {})
    if path:
        inner[last] = value
    return values


def test_what_follows_from_the_code_is_as_the_code_says() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema == values_schema(schema), "run `make schemas`"
    assert (CHART / "files" / "topics.yaml").read_text() == topics_file(), "run `make schemas`"


def test_f5_the_evaluators_memory_holds_all_jobs_that_may_run_at_once() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["services"]["evaluator"]
    settings = EvaluatorSettings(**values["settings"])
    limit = int(values["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    own = 2048
    assert settings.sandbox_jobs * settings.spec_maxima.memory_mib + own <= limit
    assert settings.spec_maxima.disk_mib <= settings.spec_maxima.memory_mib
    in_hand = len(settings.evaluator_classes) * settings.evaluator_bytes
    assert 2 * in_hand + settings.sandbox_jobs * 8 * settings.spec_maxima.output_kib * 1024 <= own * 2**20


@pytest.mark.parametrize("path", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.stem)
def test_helm_has_nothing_to_complain_about(path: Path) -> None:
    found = lint(CHART, yaml.safe_load(path.read_text()), strict=True)
    assert found["errors"] == []
    assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicaCount", 3),
        ("kafka/bootstrap", "kafka:9092"),
        ("kafka/tls/verify", True),
        ("settings/partition", 4),
        ("settings/sasl_password", "in the clear"),
        ("settings/process_index", 1),
        ("settings/spec_maxima", 7),
        ("services/trainer", {"enabled": True}),
        ("services/batcher/replicas", 2),
        ("services/builder/settings/groups_per_step", 2),
        ("services/batcher/settings/max_stalenes", 2),
        ("services/batcher/settings/max_staleness", "two"),
        ("services/capture/secretSettings/upstream_api_key", {"name": "engine"}),
        ("services/evaluator/autoscaling/mode", "keda"),
        ("monitoring/serviceMonitor/intervall", "5s"),
        ("kafka/securityProtocol", "TLS"),
        ("image/tag", "latest"),
        ("services/builder/replicas", "three"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused(chart: Chart, path: str, value: Any) -> None:
    chart.validate_schema(minimal())
    with pytest.raises(HelmValuesError, match=path.rsplit("/", maxsplit=1)[-1]):
        chart.validate_schema(minimal(path, value))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("kafka/bootstrapServers", "", "where is Kafka"),
        ("services/capture/apiKeysSecret", "", "needs a key"),
        ("services/builder/replicas", 9, "9 processes share 8 tasks"),
        ("kafka/securityProtocol", "SASL_SSL", "SASL_SSL needs it"),
        ("topics/strimzi", {"enabled": True}, "the name of the Kafka resource"),
        ("services/capture/ingress", {"enabled": True}, "ingress.host is missing"),
    ],
)
def test_values_that_cannot_work_say_what_is_missing(chart: Chart, path: str, value: Any, said: str) -> None:
    values = minimal(path, value)
    chart.validate_schema(values)
    with pytest.raises(HelmRenderError, match=said):
        chart.render(values, name="mill")


def test_the_notes_say_where_agents_go_and_what_is_missing(chart: Chart) -> None:
    notes = chart.render(minimal(), name="mill", namespace="training")["rollmill/templates/NOTES.txt"]
    assert "http://mill-rollmill-capture.training.svc:8700" in notes
    assert "does not know a model server yet" in notes
    told = minimal("services/capture/settings/upstream", "http://vllm:8000")
    assert "model server" not in chart.render(told, name="mill")["rollmill/templates/NOTES.txt"]


def test_the_chart_packs_what_it_reads(chart: Chart, tmp_path: Path) -> None:
    with Chart.load(chart.save(tmp_path)) as packed:
        names = {each["name"] for each in packed.files}
        assert packed.render(minimal(), name="mill") == chart.render(minimal(), name="mill")
    assert {"files/topics.yaml", "README.md"} <= names
    assert {f"dashboards/{path.name}" for path in (CHART / "dashboards").glob("*.json")} <= names
    assert not [name for name in names if name.startswith("ci/")]
