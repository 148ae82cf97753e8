"""Where and with what a number was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("aiokafka", "msgpack", "numpy", "orjson", "pydantic", "safetensors")


def provenance() -> dict[str, Any]:
    """Machine, versions and commit; a commit with local changes is marked."""
    return {
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
    }


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607  # git, with our words
    return result.stdout.strip()
