"""The chart's NetworkPolicies: each service reaches what it needs and no more, and who reads metrics is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart
from helm_python.errors import HelmRenderError, HelmValuesError

from deploy.chart_files import CHART, PROGRAMS

Objects = list[dict[str, Any]]
Render = Callable[[dict[str, Any]], Objects]
Policies = dict[str, dict[str, Any]]
DNS, KAFKA, ENGINE, GRADER, STORAGE = 53, 9093, 8000, 8443, 443
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def minimal(**network: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / "minimal-values.yaml").read_text())
    return {**values, "networkPolicy": {"enabled": True, **network}}


@pytest.fixture(scope="module")
def secured(render: Render) -> Objects:
    return render(yaml.safe_load((CHART / "ci" / "secured-values.yaml").read_text()))


def policies(objects: Objects) -> Policies:
    """Specs by service."""
    found = [each for each in objects if each["kind"] == "NetworkPolicy"]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"] for each in found}


def ports(rules: list[dict[str, Any]]) -> set[Any]:
    return {port["port"] for rule in rules for port in rule["ports"]}


def peers(rules: list[dict[str, Any]], port: Any, direction: str) -> list[Any]:
    """Who is let through to a port; empty: everybody."""
    (rule,) = [each for each in rules if port in ports([each])]
    found: list[Any] = rule.get(direction, [])
    return found


def test_it_is_off_until_it_is_asked_for(render: Render) -> None:
    assert policies(render(yaml.safe_load((CHART / "ci" / "minimal-values.yaml").read_text()))) == {}


def test_every_pod_has_one_policy(secured: Objects, render: Render) -> None:
    for objects in (secured, render(minimal())):
        pods = [
            each["spec"]["template"]["metadata"]["labels"] for each in objects if "template" in each.get("spec", {})
        ]
        assert set(policies(objects)) == {*PROGRAMS, "topics"}
        for labels in pods:
            selectors = [each["podSelector"]["matchLabels"].items() for each in policies(objects).values()]
            assert len([each for each in selectors if each <= labels.items()]) == 1, labels
        for each in objects:
            if each["kind"] == "NetworkPolicy":
                kubernetes_validate.validate(each, "1.37", strict=True)


def test_every_rule_names_its_ports_and_both_directions_are_closed(secured: Objects, render: Render) -> None:
    for objects in (secured, render(minimal())):
        for spec in policies(objects).values():
            assert spec["policyTypes"] == ["Ingress", "Egress"]
            assert all(rule["ports"] for rule in [*spec["ingress"], *spec["egress"]])


def test_a_service_reaches_what_it_needs(secured: Objects) -> None:
    needs = {name: {DNS, KAFKA, STORAGE} for name in PROGRAMS} | {name: {DNS, KAFKA} for name in ("ledger", "topics")}
    needs["capture"] |= {ENGINE}
    needs["evaluator"] |= {GRADER}
    found = policies(secured)
    assert {name: ports(spec["egress"]) for name, spec in found.items()} == needs
    for spec in found.values():
        assert peers(spec["egress"], KAFKA, "to") == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kafka"}}}
        ]
    assert peers(found["capture"]["egress"], ENGINE, "to") == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    assert peers(found["evaluator"]["egress"], GRADER, "to") == [{"podSelector": {"matchLabels": {"app": "grader"}}}]


def test_metrics_are_for_monitoring_alone_and_the_api_for_clients(secured: Objects, render: Render) -> None:
    for objects in (secured, render(minimal())):
        found = policies(objects)
        assert found.pop("topics")["ingress"] == []
        for name, spec in found.items():
            assert ports(spec["ingress"]) == ({"metrics", "http"} if name == "capture" else {"metrics"})
            assert peers(spec["ingress"], "metrics", "from") == [MONITORING]
    assert len(peers(policies(secured)["capture"]["ingress"], "http", "from")) == 2
    assert peers(policies(render(minimal()))["capture"]["ingress"], "http", "from") == []


def test_who_monitors_can_be_another(render: Render) -> None:
    peer = {
        "namespaceSelector": {"matchLabels": {"team": "sre"}},
        "podSelector": {"matchLabels": {"app": "prometheus"}},
    }
    found = policies(render(minimal(monitoring=peer)))
    assert peers(found["builder"]["ingress"], "metrics", "from") == [peer]


def test_ports_are_those_of_the_addresses_or_given(render: Render) -> None:
    found = policies(render(minimal()))
    assert ports(found["builder"]["egress"]) == {DNS, 9092}
    assert ports(found["capture"]["egress"]) == {DNS, 9092, 8000}
    given = policies(render(minimal(kafka={"ports": [9094, 9095]}, upstream={"ports": [443]})))
    assert ports(given["capture"]["egress"]) == {DNS, 9094, 9095, 443}


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"settings": {"claim_check_url": "s3://b/p"}}, "networkPolicy.objectStorage"),
        ({"kafka": {"bootstrapServers": "kafka"}}, "networkPolicy.kafka.ports"),
        (
            {"services": {"capture": {"apiKeysSecret": "k", "settings": {"upstream": "https://engine/v1"}}}},
            "networkPolicy.upstream.ports",
        ),
    ],
)
def test_what_a_policy_needs_to_know_is_asked_for(chart: Chart, change: dict[str, Any], missing: str) -> None:
    values = {**minimal(), **change}
    chart.validate_schema(values)
    with pytest.raises(HelmRenderError, match=missing):
        chart.render(values, name="mill")


@pytest.mark.parametrize(
    "network",
    [
        {"graders": [{"to": []}]},
        {"kafka": {"ports": ["9092"]}},
        {"monitoring": {"namespace": "m"}},
        {"egress": []},
        {"clients": {}},
    ],
)
def test_a_rule_without_bounds_is_refused(chart: Chart, network: dict[str, Any]) -> None:
    with pytest.raises(HelmValuesError):
        chart.validate_schema(minimal(**network))
