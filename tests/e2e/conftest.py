"""The wheel, built by the steps of the Dockerfile from the files that it copies, and environments with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_SECONDS = 600


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
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes an empty environment with the wheel and extras, separated by commas; returns its Python."""

    def python_with(extras: str) -> Path:
        directory = tmp_path_factory.mktemp("venv")
        image_step(directory, "install", str(wheel.parent), str(directory / "venv"), extras)
        return directory / "venv" / "bin" / "python"

    return python_with
