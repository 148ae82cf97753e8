"""What the chart installs: valid for Kubernetes, and what the rules of the pipeline ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from deploy.chart_files import CHART, PROGRAMS
from rollmill.runtime.kafka.admin import in_sync_config
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.topics import REGISTRY
from rollmill_builder.settings import BuilderSettings

Objects = list[dict[str, Any]]
Render = Callable[[dict[str, Any]], Objects]

CASES = {path.stem.removesuffix("-values"): path for path in sorted((CHART / "ci").glob("*.yaml"))}
OLDEST, NEWEST = "1.28", "1.37"
CUSTOM = ("monitoring.coreos.com", "keda.sh", "kafka.strimzi.io")
CUSTOM_SCHEMAS = CHART.parents[2] / "shared" / "crds"
WORKLOADS = ("StatefulSet", "Deployment", "Job")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def values(case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CASES[case].read_text())
    return loaded


@pytest.fixture(scope="module")
def objects(values: dict[str, Any], render: Render) -> Objects:
    return render(values)


def of_kind(objects: Objects, *kinds: str) -> Objects:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def component(workload: dict[str, Any]) -> str:
    name: str = workload["metadata"]["labels"]["app.kubernetes.io/component"]
    return name


def services(objects: Objects) -> dict[str, dict[str, Any]]:
    """Workloads by the service that they run."""
    return {component(each): each for each in of_kind(objects, "StatefulSet", "Deployment")}


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(workload)["containers"]
    found: dict[str, Any] = only
    return found


def secret_value(name: str) -> str:
    return "ab" * 32 if name.endswith("SHA256") else "a-secret"


def environment(workload: dict[str, Any], objects: Objects) -> dict[str, str]:
    """What the container sees, with something in place of secrets and the pod's ordinal."""
    found: dict[str, str] = {}
    for source in container(workload).get("envFrom", []):
        found |= named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container(workload).get("env", []):
        source = variable.get("valueFrom", {})
        unsaid = "0" if "fieldRef" in source else secret_value(variable["name"])
        found[variable["name"]] = variable.get("value", unsaid)
    return found


def secrets(node: Any) -> Iterator[str]:
    """Names of the Secrets that an object refers to."""
    if isinstance(node, dict):
        yield from [node["secretKeyRef"]["name"]] if "secretKeyRef" in node else []
        yield from [node["secretName"]] if "secretName" in node else []
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from secrets(inner)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(objects: Objects, version: str) -> None:
    ours = [each for each in objects if not each["apiVersion"].startswith(CUSTOM)]
    assert len(ours) > 5
    for each in ours:
        kubernetes_validate.validate(_known_to(version, each), version, strict=True)


def _known_to(version: str, each: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes 1.28 drops a field that it does not know; the profile of AppArmor is one since 1.30."""
    text = json.dumps(each)
    return json.loads(text.replace(', "appArmorProfile": {"type": "Unconfined"}', "")) if version == OLDEST else each


def test_every_custom_resource_is_valid(objects: Objects) -> None:
    custom = [each for each in objects if each["apiVersion"].startswith(CUSTOM)]
    if not CUSTOM_SCHEMAS.is_dir():
        pytest.skip("the schemas of KEDA, Strimzi and the Prometheus operator are not beside this checkout")
    for each in custom:
        group, _, version = each["apiVersion"].partition("/")
        schema = json.loads((CUSTOM_SCHEMAS / f"{group}-{each['kind'].lower()}_{version}.json").read_text())
        strict = Draft202012Validator(_closed(schema))
        strict.validate(each)
        assert not strict.is_valid({**each, "spec": {**each["spec"], "partitoins": 1}})


def _closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _closed(value) for name, value in schema.items()}
    named_only = "properties" in inner and "additionalProperties" not in inner
    free = schema.get("x-kubernetes-preserve-unknown-fields") or set(schema.get("properties", {})) >= {
        "metadata",
        "spec",
    }
    return {**inner, "additionalProperties": False} if named_only and not free else inner


def test_names_are_used_once(objects: Objects) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_every_service_that_is_on_has_one_workload(objects: Objects, values: dict[str, Any]) -> None:
    off = {name for name, each in values["services"].items() if each.get("enabled") is False}
    assert set(services(objects)) == set(PROGRAMS) - off
    assert {name for name, each in services(objects).items() if each["kind"] == "Deployment"} <= {"evaluator", "ledger"}


def test_every_variable_is_a_setting_of_its_service(
    objects: Objects, read_settings: Callable[[str, dict[str, str]], KafkaSettings]
) -> None:
    for workload in of_kind(objects, *WORKLOADS):
        variables = environment(workload, objects)
        settings = read_settings(component(workload), variables)
        assert settings.bootstrap_servers == variables["ROLLMILL_BOOTSTRAP_SERVERS"]
        with pytest.raises(ValueError, match="ROLLMILL_PARTITION"):
            read_settings(component(workload), {**variables, "ROLLMILL_PARTITION": "8"})


def test_all_programs_see_the_same_cluster(
    objects: Objects, read_settings: Callable[[str, dict[str, str]], KafkaSettings]
) -> None:
    shared = set(KafkaSettings.model_fields)
    seen = [
        read_settings(component(each), environment(each, objects)).model_dump(include=shared)
        for each in of_kind(objects, *WORKLOADS)
    ]
    assert all(each == seen[0] for each in seen)


def test_a_process_takes_the_number_of_its_pod(objects: Objects) -> None:
    for name, workload in services(objects).items():
        index = [each for each in container(workload).get("env", []) if each["name"] == "ROLLMILL_PROCESS_INDEX"]
        variables = environment(workload, objects)
        if name not in ("builder", "reward-merger"):
            assert not index
            assert "ROLLMILL_PROCESSES" not in variables
            continue
        (path,) = [each["valueFrom"]["fieldRef"]["fieldPath"] for each in index]
        assert path == "metadata.labels['apps.kubernetes.io/pod-index']"
        assert variables["ROLLMILL_PROCESSES"] == str(max(1, workload["spec"]["replicas"]))
    assert all(each["spec"]["replicas"] == 1 for name, each in services(objects).items() if name == "batcher")


def test_tasks_start_together_and_are_replaced_one_by_one(objects: Objects) -> None:
    for workload in of_kind(objects, "StatefulSet"):
        assert workload["spec"]["podManagementPolicy"] == "Parallel"
        assert workload["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


def test_a_stopping_pod_may_drain_twice(
    objects: Objects, read_settings: Callable[[str, dict[str, str]], KafkaSettings]
) -> None:
    for name, workload in services(objects).items():
        settings = read_settings(name, environment(workload, objects))
        drain = settings.drain_seconds if isinstance(settings, ServiceSettings) else 0
        assert pod(workload)["terminationGracePeriodSeconds"] > 2 * drain + 10


def test_a_restore_is_waited_for_and_never_killed(objects: Objects) -> None:
    for workload in services(objects).values():
        probed = container(workload)
        paths = {name: probed[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        assert paths == {"startup": "/live", "liveness": "/live", "readiness": "/ready"}
        assert {probed[f"{name}Probe"]["httpGet"]["port"] for name in paths} == {"metrics"}
        liveness = probed["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] > 30 + liveness["periodSeconds"]


def test_pods_are_confined(objects: Objects) -> None:
    for workload in of_kind(objects, *WORKLOADS):
        outside, inside = pod(workload)["securityContext"], container(workload)["securityContext"]
        assert outside["runAsNonRoot"] is True
        assert outside["runAsUser"] == outside["runAsGroup"] == outside["fsGroup"] > 0
        assert outside["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["readOnlyRootFilesystem"] is True
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert pod(workload)["automountServiceAccountToken"] is False


def test_only_a_sandbox_loosens_that(objects: Objects, values: dict[str, Any]) -> None:
    asked = values["services"].get("evaluator", {}).get("sandbox", {}).get("enabled", False)
    loose = {
        component(each) for each in of_kind(objects, *WORKLOADS) if "procMount" in container(each)["securityContext"]
    }
    assert loose == ({"evaluator"} if asked else set())
    for name, workload in services(objects).items():
        assert pod(workload).get("hostUsers", True) is (name not in loose)
        assert ("seccompProfile" in container(workload)["securityContext"]) is (name in loose)


def test_resources_and_images_are_stated(objects: Objects) -> None:
    for workload in of_kind(objects, *WORKLOADS):
        resources = container(workload)["resources"]
        assert set(resources["requests"]) == {"cpu", "memory"}
        assert "memory" in resources["limits"]
        _, _, tag = container(workload)["image"].rpartition(":")
        assert tag[0].isdigit()


def test_sessions_in_memory_fit_into_the_builder(
    objects: Objects, read_settings: Callable[[str, dict[str, str]], KafkaSettings]
) -> None:
    workload = services(objects)["builder"]
    settings = read_settings("builder", environment(workload, objects))
    assert isinstance(settings, BuilderSettings)
    tasks = -(-settings.partitions // settings.processes)
    (spill,) = [each["emptyDir"] for each in pod(workload)["volumes"] if each["name"] == "spill"]
    if workload["spec"]["replicas"]:
        assert tasks * settings.memory_budget_bytes < _bytes(container(workload)["resources"]["limits"]["memory"])
        assert tasks * settings.spill_bytes < _bytes(spill["sizeLimit"])


def _bytes(quantity: str) -> int:
    power: int = "KMGT".index(quantity[-2]) + 1
    return int(quantity[:-2]) << 10 * power


def test_what_is_mounted_is_there(objects: Objects) -> None:
    for workload in of_kind(objects, *WORKLOADS):
        claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        there = [each["name"] for each in pod(workload)["volumes"]] + claims
        mounts = container(workload)["volumeMounts"]
        assert {each["name"] for each in mounts} == set(there)
        assert len({each["mountPath"] for each in mounts}) == len(mounts)


def test_files_that_settings_name_lie_on_a_volume(objects: Objects) -> None:
    for workload in of_kind(objects, *WORKLOADS):
        mounts = [Path(each["mountPath"]) for each in container(workload)["volumeMounts"]]
        for name, value in environment(workload, objects).items():
            if name.endswith(("_FILE", "_DIR", "_DIRECTORY")):
                assert any(Path(value).is_relative_to(mount) for mount in mounts), (name, value)


def test_secrets_are_named_by_the_values_alone(objects: Objects, values: dict[str, Any]) -> None:
    said = json.dumps(values)
    assert {name for name in secrets(objects) if f'"{name}"' not in said} == set()
    assert of_kind(objects, "Secret") == []


def test_services_and_budgets_select_pods(objects: Objects) -> None:
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(objects, *WORKLOADS)]
    selectors = [each["spec"]["selector"] for each in of_kind(objects, "Service")]
    selectors += [
        each["spec"]["selector"]["matchLabels"]
        for each in of_kind(objects, "StatefulSet", "Deployment", "PodDisruptionBudget")
    ]
    for selector in selectors:
        assert len([labels for labels in pods if selector.items() <= labels.items()]) == 1


def test_services_lead_to_ports(objects: Objects) -> None:
    for service in of_kind(objects, "Service"):
        workload = services(objects)[component(service)]
        ports = {each["name"]: each["containerPort"] for each in container(workload)["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= set(ports)
        variables = environment(workload, objects)
        said = variables.get("ROLLMILL_HEALTH_PORT") or container(workload)["args"][-1]
        assert ports["metrics"] == int(said)
        assert ports.get("http") == (int(variables["ROLLMILL_PORT"]) if "ROLLMILL_PORT" in variables else None)
    for workload in of_kind(objects, "StatefulSet"):
        assert named(objects, "Service", workload["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


def test_a_budget_needs_several_pods(objects: Objects, values: dict[str, Any]) -> None:
    on = values.get("podDisruptionBudgets", True)
    scaled = {component(each): each["spec"]["minReplicaCount"] for each in of_kind(objects, "ScaledObject")}
    several = {
        name for name, each in services(objects).items() if scaled.get(name, each["spec"].get("replicas", 0)) > 1 and on
    }
    assert {component(each) for each in of_kind(objects, "PodDisruptionBudget")} == several


def test_one_hand_sets_the_number_of_evaluators(objects: Objects) -> None:
    evaluator = services(objects)["evaluator"]
    scaled = of_kind(objects, "ScaledObject")
    assert ("replicas" in evaluator["spec"]) is not bool(scaled)
    for each in scaled:
        assert each["spec"]["scaleTargetRef"] == {"kind": "Deployment", "name": evaluator["metadata"]["name"]}
        prefix = environment(evaluator, objects)["ROLLMILL_PREFIX"]
        for trigger in each["spec"]["triggers"]:
            assert trigger["metadata"]["topic"] == f"{prefix}built"
            assert trigger["metadata"]["consumerGroup"].startswith(f"{prefix}evaluator.")
            named(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])


def test_topics_are_there_before_the_services(objects: Objects, values: dict[str, Any]) -> None:
    jobs = of_kind(objects, "Job")
    topics = of_kind(objects, "KafkaTopic")
    assert bool(jobs) is not bool(topics)
    for job in jobs:
        assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert "envFrom" not in container(job)
        assert container(job)["args"] == ["rollmill", "topics", "apply"]
    if topics:
        settings = KafkaSettings.model_construct(prefix=values["settings"]["prefix"])
        replicas = {each["spec"]["replicas"] for each in topics}
        assert replicas == {3}
        found = {each["spec"]["topicName"]: (each["spec"]["partitions"], each["spec"]["config"]) for each in topics}
        assert found == {
            topic.full_name(settings.prefix): (
                topic.partitions(settings),
                {**topic.broker_config(), **in_sync_config(3)},
            )
            for topic in REGISTRY
        }


def test_dashboards_come_as_they_are(objects: Objects, values: dict[str, Any]) -> None:
    on = values.get("monitoring", {}).get("dashboards", {}).get("enabled", True)
    maps = [each["data"] for each in of_kind(objects, "ConfigMap") if component(each) == "dashboard"]
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: text for data in maps for name, text in data.items()} == (files if on else {})


def test_a_monitor_finds_every_metrics_port_once(objects: Objects) -> None:
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        found = [each for each in of_kind(objects, "Service") if wanted <= each["metadata"]["labels"].items()]
        assert {component(each) for each in found} == set(services(objects))
        assert len(found) == len(services(objects))


def test_a_changed_setting_restarts_the_pods(render: Render) -> None:
    values = yaml.safe_load(CASES["minimal"].read_text())
    before = services(render(values))
    values["services"]["builder"] = {"settings": {"late_window_seconds": 60}}
    after = services(render(values))
    changed = {name for name in before if before[name]["spec"]["template"] != after[name]["spec"]["template"]}
    assert changed == {"builder"}


def test_large_numbers_are_written_out(render: Render) -> None:
    values = yaml.safe_load(CASES["minimal"].read_text())
    values["services"]["batcher"] = {"settings": {"tokens_per_step": 16777216, "loss_constant": 0.5}}
    data = named(render(values), "ConfigMap", "mill-rollmill-batcher")["data"]
    assert data["ROLLMILL_TOKENS_PER_STEP"] == "16777216"
    assert data["ROLLMILL_LOSS_CONSTANT"] == "0.5"
