"""TLS and SASL against Apache Kafka with its own certificates: who comes in, and what is said to who does not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from rollmill.codec import encode
from rollmill.errors import EXIT_FATAL, ConfigurationError, FatalError
from rollmill.models import PolicyVersion, SessionClosed
from rollmill.runtime.kafka.admin import apply_topics, verify_topics
from rollmill.runtime.kafka.clients import KafkaClients, faststream_broker
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka, Listener, User, running_kafka
from rollmill.runtime.kafka.embedded.ports import choose_ports
from rollmill.settings import KafkaSettings
from rollmill.testing.topic_log import produce, read
from rollmill.topics import COMPLETIONS
from rollmill.trainer import BatchStream

pytestmark = pytest.mark.kafka

PASSWORD = "open-sesame"  # noqa: S105  # of a broker that lives for one test run
FAREWELL_SECONDS = 20.0
DOORS = ("SSL", "SASL_SSL", "SASL_PLAINTEXT", "MUTUAL", "STRANGER")


class Rig(NamedTuple):
    """A broker with a listener of each kind, and the files that its clients need."""

    kafka: EmbeddedKafka
    doors: dict[str, str]
    files: Path


def _pem(path: Path, cert: trustme.LeafCert) -> Path:
    """Key and chain in one file, the key in the form that Java reads."""
    key = load_pem_private_key(cert.private_key_pem.bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with path.open("ab") as file:
        for blob in cert.cert_chain_pems:
            file.write(blob.bytes())
    return path


def _listeners(files: Path) -> tuple[Listener, ...]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(files / "ca.pem")
    trustme.CA().cert_pem.write_to_path(files / "other-ca.pem")
    client = authority.issue_cert("client")
    client.private_key_pem.write_to_path(files / "client.key")
    client.cert_chain_pems[0].write_to_path(files / "client.pem")
    own = _pem(files / "broker.pem", authority.issue_cert("127.0.0.1", "localhost"))
    stranger = _pem(files / "stranger.pem", authority.issue_cert("elsewhere.example"))
    kinds: dict[str, dict[str, Any]] = {
        "SSL": {"protocol": "SSL", "key_and_chain_file": own},
        "SASL_SSL": {"protocol": "SASL_SSL", "key_and_chain_file": own},
        "SASL_PLAINTEXT": {"protocol": "SASL_PLAINTEXT"},
        "MUTUAL": {"protocol": "SSL", "key_and_chain_file": own, "client_ca_file": files / "ca.pem"},
        "STRANGER": {"protocol": "SSL", "key_and_chain_file": stranger},
    }
    made = []
    for name, kind in kinds.items():
        port = choose_ports(files / f"{name}.json", None).broker
        made.append(Listener(name=f"DOOR_{name}", port=port, advertised_port=port, **kind))
    return tuple(made)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    files = tmp_path_factory.mktemp("security")
    listeners = _listeners(files)
    users = (User.model_validate({"name": "alice", "password": PASSWORD}),)
    config = BrokerConfig(test_mode=True, start_seconds=180, more_listeners=listeners, users=users)
    with running_kafka(files / "kafka", config) as kafka:
        doors = {door.name.removeprefix("DOOR_"): f"127.0.0.1:{door.port}" for door in listeners}
        yield Rig(kafka, {**doors, "PLAINTEXT": kafka.bootstrap_servers}, files)


def options(rig: Rig, door: str, **changes: Any) -> dict[str, Any]:
    """Settings that open this door."""
    protocol = {"MUTUAL": "SSL", "STRANGER": "SSL"}.get(door, door)
    given: dict[str, Any] = {
        "bootstrap_servers": rig.doors[door],
        "security_protocol": protocol,
        "partitions": 1,
        "batch_partitions": 1,
    }
    if protocol.startswith("SASL"):
        given |= {"sasl_username": "alice", "sasl_password": PASSWORD}
    if protocol.endswith("SSL"):
        given |= {"tls_ca_file": rig.files / "ca.pem"}
    if door == "MUTUAL":
        given |= {"tls_certificate_file": rig.files / "client.pem", "tls_key_file": rig.files / "client.key"}
    return {**given, **changes}


async def farewells_said() -> None:
    """Return once every connection of the running loop is closed.

    aiokafka lets go of connections, those for the bootstrap and refused ones, whose TLS still waits for the broker's
    farewell. Nobody can reach them any more, and a loop that ends before them leaves their sockets to the collector.
    """
    transports = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]  # no public way
    async with asyncio.timeout(FAREWELL_SECONDS):
        while True:
            if all(each.get_extra_info("socket").fileno() == -1 for each in list(transports.values())):
                return
            await asyncio.sleep(0.01)


@pytest.fixture
async def _nothing_left_open() -> AsyncIterator[None]:
    yield
    await farewells_said()


WAYS = [
    ("SSL", {}),
    ("MUTUAL", {}),
    ("STRANGER", {"tls_check_hostname": False}),
    ("SASL_PLAINTEXT", {"sasl_mechanism": "SCRAM-SHA-256"}),
    ("SASL_SSL", {"sasl_mechanism": "SCRAM-SHA-512"}),
    ("SASL_SSL", {"sasl_mechanism": "PLAIN"}),
]


@pytest.mark.usefixtures("_nothing_left_open")
@pytest.mark.parametrize(("door", "changes"), WAYS)
async def test_every_client_comes_in(rig: Rig, topic_prefix: str, door: str, changes: dict[str, Any]) -> None:
    settings = KafkaSettings.model_validate(options(rig, door, prefix=topic_prefix, **changes))
    await apply_topics(settings, [COMPLETIONS])
    await produce(settings, COMPLETIONS, [("s", encode(SessionClosed(session_id="s")))])
    async with faststream_broker(settings) as broker:
        await broker.publish(b"{}", COMPLETIONS.full_name(topic_prefix), key=b"s")
    producer = KafkaClients(settings).producer(f"{topic_prefix}transactional")
    await producer.start()
    async with producer.transaction():
        await producer.send_and_wait(COMPLETIONS.full_name(topic_prefix), b"{}", b"s")
    await producer.stop()
    assert len(await read(settings, COMPLETIONS, 3)) == 3


REFUSALS = [
    ("SASL_SSL", {"sasl_password": "wrong"}, "ROLLMILL_SASL_PASSWORD"),
    ("SASL_PLAINTEXT", {"sasl_username": "mallory"}, "user 'mallory' or its password is wrong"),
    ("SASL_SSL", {"sasl_mechanism": "PLAIN", "sasl_password": "wrong"}, "ROLLMILL_SASL_PASSWORD"),
    ("SSL", {"tls_ca_file": "other-ca.pem"}, "set ROLLMILL_TLS_CA_FILE"),
    ("SSL", {"tls_ca_file": None}, "set ROLLMILL_TLS_CA_FILE"),
    ("STRANGER", {}, "certificate is for another name"),
    ("MUTUAL", {"tls_certificate_file": None, "tls_key_file": None}, "ROLLMILL_TLS_CERTIFICATE_FILE"),
    ("SSL", {"security_protocol": "PLAINTEXT"}, "it uses TLS there; set ROLLMILL_SECURITY_PROTOCOL to SSL"),
    ("PLAINTEXT", {"security_protocol": "SSL"}, "does not use TLS there; set ROLLMILL_SECURITY_PROTOCOL to PLAINTEXT"),
    ("SASL_PLAINTEXT", {"security_protocol": "PLAINTEXT"}, "it asks for a user"),
    ("SASL_SSL", {"security_protocol": "SSL"}, "it asks for a user"),
    (
        "SSL",
        {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": PASSWORD},
        "not ask for a user",
    ),
]


@pytest.mark.usefixtures("_nothing_left_open")
@pytest.mark.parametrize(("door", "changes", "advice"), REFUSALS)
async def test_a_refused_client_is_told_what_to_do_at_once(
    rig: Rig, door: str, changes: dict[str, Any], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    if changes.get("tls_ca_file"):
        changes = {**changes, "tls_ca_file": rig.files / changes["tls_ca_file"]}
    settings = KafkaSettings.model_validate(options(rig, door, **changes))
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=advice) as refused:
        await verify_topics(settings)
    assert time.monotonic() - began < 15
    for text in (str(refused.value), caplog.text):
        assert PASSWORD not in text
        assert "wrong'" not in text


def test_a_service_with_a_wrong_password_ends_at_once(rig: Rig) -> None:
    given = options(rig, "SASL_SSL", sasl_password="not-" + PASSWORD, spill_directory=rig.files)
    environment = {f"ROLLMILL_{name.upper()}": str(value) for name, value in given.items()}
    done = subprocess.run(
        [sys.executable, "-m", "rollmill_builder"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_FATAL
    assert "ROLLMILL_SASL_PASSWORD" in done.stdout + done.stderr
    assert PASSWORD not in done.stdout + done.stderr


def test_the_trainer_is_told_too(rig: Rig) -> None:
    settings = KafkaSettings.model_validate(options(rig, "SASL_SSL", sasl_password="wrong"))  # noqa: S106  # wrong
    with BatchStream(settings=settings) as stream:
        with pytest.raises(FatalError, match="ROLLMILL_SASL_PASSWORD"):
            next(stream.steps(PolicyVersion))
        stream._loop.call(farewells_said())


def test_files_that_cannot_be_used_are_named(rig: Rig) -> None:
    for changes, name in (
        ({"tls_ca_file": rig.files / "none.pem"}, "ROLLMILL_TLS_CA_FILE"),
        ({"tls_ca_file": rig.files / "client.key"}, "ROLLMILL_TLS_CA_FILE"),
        ({"tls_certificate_file": rig.files / "ca.pem", "tls_key_file": rig.files / "client.key"}, "TLS_CERTIFICATE"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            KafkaClients(KafkaSettings.model_validate(options(rig, "SSL", **changes)))
