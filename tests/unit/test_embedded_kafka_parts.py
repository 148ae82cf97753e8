"""What the embedded broker decides before Java starts: jars, Java, ports, identity, settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.embedded.artifacts import class_path
from rollmill.runtime.kafka.embedded.config import BrokerConfig
from rollmill.runtime.kafka.embedded.java import find_java, java_version
from rollmill.runtime.kafka.embedded.listeners import Listener
from rollmill.runtime.kafka.embedded.lock import LOCK_PATH, ArtifactLock, LockedArtifact, load_lock
from rollmill.runtime.kafka.embedded.ports import Ports, choose_ports
from rollmill.runtime.kafka.embedded.storage import new_cluster_id
from rollmill.runtime.kafka.embedded.tools import ToolSettings

JAR_DIGEST = "f" * 64
JAR = LockedArtifact(group="org.example.log", artifact="core", version="1.2", sha256=JAR_DIGEST)
LOCK = ArtifactLock(coordinates=(JAR.coordinate,), artifacts=(JAR,))


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def write_java(path: Path, version: str) -> Path:
    return write_program(path, f"echo 'openjdk version \"{version}\"' >&2")


def test_the_lock_holds_one_version_of_all_kafka_jars_and_no_address() -> None:
    kafka = [artifact for artifact in load_lock().artifacts if artifact.group == "org.apache.kafka"]
    assert {"kafka_2.13", "kafka-clients", "kafka-raft"} <= {artifact.artifact for artifact in kafka}
    assert len({artifact.version for artifact in kafka}) == 1
    assert "://" not in LOCK_PATH.read_text()


def test_a_jar_that_is_not_the_locked_one_is_named(tmp_path: Path) -> None:
    jar = tmp_path / "org/example/log/core/1.2/core-1.2.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"half a download")
    with pytest.raises(ConfigurationError, match=r"org\.example\.log:core:1\.2 .*core-1\.2\.jar"):
        class_path(ToolSettings(repository=tmp_path), LOCK)


def test_a_jar_that_cannot_be_fetched_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "bin/mvn", "echo unreachable; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigurationError, match=r"(?s)could not be fetched.*unreachable"):
        class_path(ToolSettings(repository=tmp_path / "repository"), LOCK)


def test_an_old_java_home_gives_way_to_a_new_java_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_java(tmp_path / "home/bin/java", "11.0.2")
    newer = write_java(tmp_path / "path/java", "21")
    monkeypatch.setenv("PATH", str(newer.parent))
    assert find_java(ToolSettings(java_home=tmp_path / "home")) == newer


@pytest.mark.parametrize(("text", "major"), [("17.0.15", 17), ("25-ea", 25), ("1.8.0_402", 1), ("unknown", 0)])
def test_versions_of_java_are_read_as_java_prints_them(tmp_path: Path, text: str, major: int) -> None:
    assert java_version(write_java(tmp_path / "java", text)) == major


def test_what_is_no_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "absent") == 0


def test_ports_stay_the_same_until_another_program_takes_one(tmp_path: Path) -> None:
    first = choose_ports(tmp_path / "ports.json", None)
    assert choose_ports(tmp_path / "ports.json", None) == first
    with socket.create_server(("127.0.0.1", first.broker)):
        moved = choose_ports(tmp_path / "ports.json", None)
    assert moved.broker != first.broker
    assert moved.controller == first.controller
    assert Ports.model_validate_json((tmp_path / "ports.json").read_bytes()) == moved


def test_a_port_that_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} .* is taken"):
            choose_ports(tmp_path / "ports.json", port)
    assert choose_ports(tmp_path / "ports.json", port).broker == port


def test_a_cluster_id_is_what_the_storage_tool_accepts() -> None:
    ids = {new_cluster_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(text) == 22 and not text.startswith("-") for text in ids)


def properties(config: BrokerConfig) -> dict[str, str]:
    text = config.server_properties(log_dir=Path("/data"), broker_port=21_000, controller_port=21_001)
    return dict(line.split("=", 1) for line in text.splitlines())


def test_one_node_serves_on_loopback_and_never_waits_for_replicas() -> None:
    settings = properties(BrokerConfig(message_max_bytes=3_000_000))
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:21000,CONTROLLER://127.0.0.1:21001"
    assert {value for key, value in settings.items() if key.endswith(("replication.factor", "min.isr"))} == {"1"}
    assert settings["message.max.bytes"] == settings["replica.fetch.max.bytes"] == "3000000"
    assert settings["auto.create.topics.enable"] == "false"


def test_a_further_listener_is_bound_at_one_port_and_told_to_clients_as_another() -> None:
    settings = properties(BrokerConfig(more_listeners=(Listener(name="BATCHER", port=22_000, advertised_port=23_000),)))
    assert settings["listeners"].endswith(",BATCHER://127.0.0.1:22000")
    assert settings["advertised.listeners"].endswith(",BATCHER://127.0.0.1:23000")
    assert settings["listener.security.protocol.map"].endswith(",BATCHER:PLAINTEXT")


def test_test_mode_only_changes_how_soon_things_happen() -> None:
    usual, quick = properties(BrokerConfig()), properties(BrokerConfig(test_mode=True))
    changed = {key for key in quick if usual.get(key) != quick[key]}
    assert "log.cleaner.backoff.ms" in changed
    assert all(key.endswith(".ms") for key in changed)
