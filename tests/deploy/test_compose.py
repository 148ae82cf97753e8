"""docker-compose.yml: valid, pinned, confined, and of one mind with the services' settings."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.chart_files import PROGRAMS
from rollmill.runtime.kafka.embedded.config import SINGLE_NODE, BrokerConfig
from rollmill.runtime.supervisor import DRAIN_ORDER
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.topics import REGISTRY
from rollmill_builder.settings import BuilderSettings
from rollmill_capture.http.keys import accepted_keys
from rollmill_capture.settings import CaptureSettings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")
SHARED = set(KafkaSettings.model_fields)

Service = dict[str, Any]
ReadSettings = Callable[[str, dict[str, str]], KafkaSettings]


def resolved(environment: dict[str, str]) -> dict[str, Any]:
    """The file as compose sees it: anchors merged, variables put in."""

    def value(found: re.Match[str]) -> str:
        default = found["default"]
        assert default is not None, f"{found[0]} has no default, so a first start would complain"
        return environment.get(found["name"]) or default

    document: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, FILE.read_text()))
    return document


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return resolved({})


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = compose["services"]
    return found


def environment(service: Service) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def program(name: str) -> str:
    """Whose settings a container reads: the one-shot creation of the topics has Kafka's alone."""
    return name if name in PROGRAMS else "ledger"


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration or "0s").groups()  # type: ignore[union-attr]  # else the test fails
    return int(number) * {"s": 1, "m": 60}[unit]


def mebibytes(size: str) -> int:
    return int(size[:-1]) * {"m": 1, "g": 1024}[size[-1]]


def check(file: Path) -> int:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode


def test_the_file_is_as_the_compose_specification_says(tmp_path: Path) -> None:
    assert check(FILE) == 0
    wrong = tmp_path / "compose.yml"
    wrong.write_text(FILE.read_text().replace("condition: service_healthy", "condition: service_well"))
    assert check(wrong) == 1


def test_everything_promised_is_in_it(services: dict[str, Service]) -> None:
    by_default = {name for name, service in services.items() if not service.get("profiles")}
    assert by_default == {*DRAIN_ORDER, "kafka", "topics", "ledger", "prometheus", "grafana"}
    assert {name for name, service in services.items() if "demo" in service.get("profiles", [])} == {
        "engine",
        "trainer",
    }
    assert {name for name, service in services.items() if "ui" in service.get("profiles", [])} == {"kafka-ui"}


def test_every_variable_is_a_setting(services: dict[str, Service], read_settings: ReadSettings) -> None:
    seen = []
    for name, service in services.items():
        variables = environment(service)
        if any(each.startswith("ROLLMILL_") for each in variables):
            settings = read_settings(program(name), variables)
            seen.append(settings.model_dump(include=SHARED))
            with pytest.raises(ValueError, match="ROLLMILL_PARTITION"):
                read_settings(program(name), {**variables, "ROLLMILL_PARTITION": "8"})
    assert len(seen) >= len(PROGRAMS) + 1
    assert all(each == seen[0] for each in seen), "all of them speak of the same cluster and topics"


def test_variables_of_the_shell_reach_the_services(read_settings: ReadSettings) -> None:
    given = {"ROLLMILL_PREFIX": "seven.", "ROLLMILL_PARTITIONS": "4", "ROLLMILL_WORLD_SIZE": "2"}
    services = resolved(given)["services"]
    settings = read_settings("batcher", environment(services["batcher"])).model_dump()
    assert (settings["prefix"], settings["partitions"], settings["world_size"]) == ("seven.", 4, 2)
    assert read_settings("ledger", environment(services["topics"])).prefix == "seven."


def test_images_are_pinned(services: dict[str, Service]) -> None:
    for name, service in services.items():
        repository, _, tag = service["image"].rpartition(":")
        assert repository, name
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), service["image"]
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base[1])


def test_services_are_built_from_the_one_dockerfile(services: dict[str, Service]) -> None:
    for name, service in services.items():
        if service["image"].startswith("rollmill-") and name != "ledger":
            assert service["image"].startswith(f"rollmill-{service['build']['args']['SERVICE']}:")
    for name in DRAIN_ORDER:
        assert services[name]["build"]["args"]["SERVICE"] == name


def test_containers_are_confined(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("read_only", False) is (name != "kafka"), name
        assert "privileged" not in service, name
        assert service.get("user") or service["image"].startswith("rollmill-"), f"{name} may run as root"
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}, name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"]["max-size"], name
    assert re.search(r"^USER [1-9]\d*:\d+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    loose = {name for name, service in services.items() if "seccomp=unconfined" in service["security_opt"]}
    assert loose == {"evaluator"}


def test_a_stopping_service_may_drain_twice(services: dict[str, Service], read_settings: ReadSettings) -> None:
    for name in DRAIN_ORDER:
        settings = read_settings(name, environment(services[name]))
        assert isinstance(settings, ServiceSettings)
        assert seconds(services[name]["stop_grace_period"]) > 2 * settings.drain_seconds + 10
    config = BrokerConfig()
    assert seconds(services["kafka"]["stop_grace_period"]) > config.stop_seconds


def test_what_is_waited_for_can_be_told(services: dict[str, Service]) -> None:
    order: list[str] = []
    while len(order) < len(services):
        free = [
            name for name in services if name not in order and set(services[name].get("depends_on", {})) <= set(order)
        ]
        assert free, "some wait for each other"
        order += free
    for service in services.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait["condition"] != "service_healthy" or services[name]["healthcheck"]["test"][0] == "CMD"
            assert wait["condition"] != "service_completed_successfully" or name == "topics"
    for name in DRAIN_ORDER:
        assert services[name]["depends_on"] == {"topics": {"condition": "service_completed_successfully"}}


def test_only_this_machine_is_let_in(services: dict[str, Service]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_metrics_and_health_are_not_published(services: dict[str, Service]) -> None:
    inside = {port.split(":")[2] for service in services.values() for port in service.get("ports", [])}
    assert not {environment(services[name])["ROLLMILL_HEALTH_PORT"] for name in DRAIN_ORDER} & inside
    assert ServiceSettings.model_fields["health_host"].default == "127.0.0.1"


def test_volumes_and_files_are_there(compose: dict[str, Any], services: dict[str, Service]) -> None:
    used = set()
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if source.startswith("."):
                assert (ROOT / source).exists(), volume
                assert mode == ["ro"], volume
            else:
                used.add(source)
            assert target.startswith("/"), name
    assert used == set(compose["volumes"])


def test_files_that_settings_name_lie_on_a_volume(services: dict[str, Service]) -> None:
    for name, service in services.items():
        targets = [Path(volume.split(":")[1]) for volume in service.get("volumes", [])]
        for variable, value in environment(service).items():
            if variable.startswith("ROLLMILL_") and variable.endswith(("_FILE", "_DIR", "_DIRECTORY")):
                assert any(Path(value).is_relative_to(target) for target in targets), (name, variable)


def test_memory_of_sessions_fits(services: dict[str, Service], read_settings: ReadSettings) -> None:
    settings = read_settings("builder", environment(services["builder"]))
    assert isinstance(settings, BuilderSettings)
    limit = mebibytes(services["builder"]["deploy"]["resources"]["limits"]["memory"])
    assert settings.partitions * settings.memory_budget_bytes < limit * 2**20


def test_the_key_of_the_first_start_opens_capture() -> None:
    keys = accepted_keys(CaptureSettings(host="0.0.0.0", api_keys_file=ROOT / "deploy" / "keys.json"))
    assert keys.tenant_of("rollmill") == "local"
    assert keys.tenant_of("another") is None


def test_kafka_is_set_up_as_the_embedded_one(services: dict[str, Service]) -> None:
    given = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment(services["kafka"]).items()
        if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS"
    }
    known = BrokerConfig().server_properties(log_dir=ROOT, broker_port=1, controller_port=2)
    names = {line.partition("=")[0] for line in known.splitlines()}
    assert set(given) - names <= {"controller.quorum.voters"}
    own = {"inter.broker.listener.name", "controller.listener.names"}
    differing = {name for name, value in given.items() if SINGLE_NODE.get(name, value).lower() != value.lower()}
    assert differing <= own
    missing = {name for name in SINGLE_NODE if "replication" in name or name.endswith("isr")} - set(given)
    assert missing == set()
    assert int(given["message.max.bytes"]) == BrokerConfig().message_max_bytes
    assert int(given["message.max.bytes"]) > max(topic.max_bytes for topic in REGISTRY)
    doors = dict(door.split("://") for door in given["advertised.listeners"].split(","))
    assert doors["INTERNAL"] == environment(services["builder"])["ROLLMILL_BOOTSTRAP_SERVERS"]
    assert f"{doors['MACHINE']}:{doors['MACHINE'].rpartition(':')[2]}" in services["kafka"]["ports"]


def test_prometheus_reads_every_program(services: dict[str, Service]) -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    del targets["prometheus"]
    assert targets == {name: [f"{name}:9400"] for name in PROGRAMS}
    for name in DRAIN_ORDER:
        assert environment(services[name])["ROLLMILL_HEALTH_PORT"] == "9400"
    assert services["ledger"]["command"][-1] == "9400"


def test_prometheus_takes_its_configuration(promtool: str) -> None:
    command = [promtool, "check", "config", str(ROOT / "deploy" / "prometheus.yml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_grafana_finds_prometheus_and_the_dashboards(services: dict[str, Service]) -> None:
    folder = ROOT / "deploy" / "grafana"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True
    (provider,) = yaml.safe_load((folder / "dashboards" / "rollmill.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./charts/rollmill/dashboards"] == provider["options"]["path"]
    assert mounted["./deploy/grafana"] == "/etc/grafana/provisioning"
