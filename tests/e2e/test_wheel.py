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
INSTALL_SECONDS, READY_SECONDS = 600, 60

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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in copied_into_images():
        into = source / name
        into.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, into)
    image_step(source, "wheel", str(source), str(out))
    (built,) = out.iterdir()
    return built


def copied_into_images() -> list[str]:
    """Files and folders of the stage that builds the wheel, as the Dockerfile has them; its steps are ours, too."""
    stage = (ROOT / "Dockerfile").read_text().partition("AS wheel")[2].partition("\nFROM ")[0]
    assert "RUN deploy/image.sh wheel /source /dist\n" in stage
    assert 'RUN deploy/image.sh install /dist /opt/rollmill "${SERVICE:?is missing}${EXTRAS:+,$EXTRAS}"\n' in stage
    return [name for names in re.findall(r"^COPY (.+) \S+$", stage, re.MULTILINE) for name in names.split()]


def image_step(directory: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "deploy" / "image.sh"), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_SECONDS, cwd=directory, env=environment)


@pytest.fixture(scope="session")
def environment_with(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Python of an empty environment with the wheel and one extra ("" is none).

    Extras that ask for the same packages share one: installing takes longer than all that is tested.
    """
    made: dict[frozenset[str], Path] = {}

    def python_with(extra: str) -> Path:
        wanted = requirements(wheel, extra)
        if wanted not in made:
            made[wanted] = install(wheel, extra, tmp_path_factory.mktemp("venv"))
        return made[wanted]

    return python_with


def requirements(wheel: Path, extra: str) -> frozenset[str]:
    """What an extra asks for beside the base, as the wheel's metadata has it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        asked = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    marked = f"extra == '{extra}'" if extra else "no extra"
    return frozenset(line.partition(";")[0] for line in asked if line.rstrip().endswith(marked))


def install(wheel: Path, extra: str, directory: Path) -> Path:
    image_step(directory, "install", str(wheel.parent), str(directory / "venv"), extra)
    return directory / "venv" / "bin" / "python"


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
