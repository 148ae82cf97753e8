"""One wheel: it imports without PyTorch, and each service starts with its own extra alone.

It is built and installed by the steps of the Dockerfile, from the files that the Dockerfile copies.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from asyncio.subprocess import Process
from collections.abc import Callable
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from tempfile import gettempdir

import pytest

from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import DRAIN_ORDER, free_port, kafka_environment
from rollmill.runtime.supervisor.supervisor import is_ready
from rollmill.settings import KafkaSettings

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
START = ROOT / "deploy" / "start.sh"
READY_SECONDS = 60

BARE = """
import importlib.util, pkgutil, sys
import rollmill, rollmill.codec, rollmill.runtime.kafka.clients, rollmill.ops.ledger, rollmill.models
import rollmill.strategies, rollmill.runtime.stream, rollmill.topics, rollmill.trainer
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("faststream") is None
assert "site-packages" in rollmill.__file__, rollmill.__file__
from rollmill import schemas
assert schemas.load("openapi.json")["openapi"] == "3.1.0"
assert schemas.load("trajectory.v1.schema.json")["title"] == "trajectory"
assert schemas.text("asyncapi.yaml")
"""


@pytest.fixture(scope="session")
def environment_with(wheel: Path, install: Callable[[str], Path]) -> Callable[[str], Path]:
    """Python of an empty environment with the wheel and one extra ("" is none).

    Extras that ask for the same packages share one: installing takes longer than all that is tested.
    """
    made: dict[frozenset[str], Path] = {}

    def python_with(extra: str) -> Path:
        wanted = requirements(wheel, extra)
        if wanted not in made:
            made[wanted] = install(extra)
        return made[wanted]

    return python_with


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def requirements(wheel: Path, extra: str) -> frozenset[str]:
    """What an extra asks for beside the base, as the wheel's metadata has it."""
    asked = metadata_of(wheel).get_all("Requires-Dist", [])
    marked = f"extra == '{extra}'" if extra else "no extra"
    return frozenset(line.partition(";")[0] for line in asked if line.rstrip().endswith(marked))


def test_a_package_index_would_take_the_wheel_and_its_links_lead_to_the_repository(wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel)], check=True, timeout=60)
    text = metadata_of(wheel).get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith(("https://", "http://"))] == []
    assert metadata_of(wheel)["Project-URL"]


def test_the_bare_wheel_imports_without_torch_and_without_a_service(
    environment_with: Callable[[str], Path], tmp_path: Path
) -> None:
    python = environment_with("")
    subprocess.run([str(python), "-W", "error", "-c", BARE], check=True, cwd=tmp_path, timeout=60)
    shown = subprocess.run([str(python.parent / "rollmill"), "version"], check=True, capture_output=True, cwd=tmp_path)
    assert shown.stdout.strip() == b"0.1.0"
    up = [str(python.parent / "rollmill"), "up", "--upstream", "http://127.0.0.1:1"]
    refused = subprocess.run(up, check=False, capture_output=True, cwd=tmp_path, text=True, timeout=60)
    assert refused.returncode == 70
    assert "pip install 'rollmill[services,embedded]'" in refused.stderr


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2)
    await apply_topics(settings)
    return settings


@pytest.fixture(scope="session")
def as_in_a_container() -> Callable[[Path], list[str]]:
    """Runs a command as containers do: another user, and nothing to write to but a folder for temporary files.

    Plainly, where bubblewrap cannot.
    """
    bwrap = os.environ.get("ROLLMILL_SANDBOX_BWRAP", "bwrap")
    confined = [bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", gettempdir()]
    confined += ["--unshare-user", "--uid", "10001", "--gid", "10001"]
    there = shutil.which(bwrap) is not None
    possible = there and subprocess.run([*confined, "true"], check=False, capture_output=True).returncode == 0

    def command(venv: Path) -> list[str]:
        read = (word for path in (venv, START.parent) for word in ("--ro-bind", str(path), str(path)))
        return [*confined, *read] if possible else []

    return command


@pytest.mark.parametrize("service", DRAIN_ORDER)
async def test_a_service_starts_with_its_own_extra_alone(
    service: str,
    environment_with: Callable[[str], Path],
    as_in_a_container: Callable[[Path], list[str]],
    settings: KafkaSettings,
    tmp_path: Path,
) -> None:
    python = await asyncio.to_thread(environment_with, service)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    port = free_port()
    ports = {"ROLLMILL_HEALTH_PORT": str(port), "ROLLMILL_PORT": str(free_port())}
    image = {"SERVICE": service, "PATH": f"{python.parent}:{bare['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = await asyncio.create_subprocess_exec(
        *as_in_a_container(python.parents[1]),
        # bubblewrap passes no signals on, so whoever stops the service has to know it.
        *("/bin/sh", "-c", f"echo $$; . {START}"),
        cwd=tmp_path,
        env={**bare, **kafka_environment(settings), **ports, **image},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    started = int(await asyncio.wait_for(process.stdout.readline(), READY_SECONDS))
    ready = await ready_or_ended(process, port)
    if process.returncode is None:
        os.kill(started, signal.SIGTERM)
    _, said = await asyncio.wait_for(process.communicate(), READY_SECONDS)
    assert ready, said.decode()
    assert process.returncode == 0, said.decode()


async def ready_or_ended(process: Process, port: int) -> bool:
    """Whether the service answers that it is ready, before it ends."""
    async with asyncio.timeout(READY_SECONDS):
        for _ in range(READY_SECONDS * 10):
            if process.returncode is not None:
                return False
            if await is_ready("127.0.0.1", port):
                return True
            await asyncio.sleep(0.1)
    return False
