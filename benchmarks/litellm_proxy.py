"""LiteLLM's proxy from PyPI, in a virtual environment of its own, for comparison."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.processes import Running, answers, stopped

VENV = Path(".rollmill") / "litellm-venv"
INSTALL_SECONDS = 900
START_SECONDS = 120.0


class MissingError(Exception):
    """Why there is no LiteLLM here."""


def installed() -> Path:
    """The program; installed where it is not yet. Raises MissingError."""
    program = VENV / "bin" / "litellm"
    if program.exists():
        return program
    commands = (
        [sys.executable, "-m", "venv", str(VENV)],
        [str(VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "litellm[proxy]"],
    )
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)  # noqa: S603  # ours
        except subprocess.CalledProcessError as error:
            raise MissingError(f"litellm does not install: {error.stderr[-300:]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingError(f"litellm does not install: {error}") from error
    return program


KEY = "sk-" + secrets.token_hex(24)
"""It does not start without one."""


@asynccontextmanager
async def litellm_proxy(upstream: str, port: int, directory: Path) -> AsyncIterator[Running]:
    """One worker in front of ``upstream``, without a database or keys. Raises MissingError."""
    program = await asyncio.to_thread(installed)
    configuration = directory / "litellm.json"
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": f"{upstream}/v1", "api_key": "x"},
        }
        for name in ("paced", "fast")
    ]
    configuration.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    arguments = ("--config", str(configuration), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    with (directory / "litellm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(str(program), *arguments, stdout=log, stderr=log)
    async with stopped(process):
        if not await answers(port, "/health/liveliness", START_SECONDS):
            words = (directory / "litellm.log").read_text(errors="replace")[-300:]
            raise MissingError(f"litellm does not start: {words}")
        yield Running(process.pid, port)
