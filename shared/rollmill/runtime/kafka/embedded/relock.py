"""Writes the lock of the broker's jars: ``python -m rollmill.runtime.kafka.embedded.relock [G:A:VERSION …]``.

Without arguments the coordinates of the present lock are resolved again; give others to move to another version.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rollmill.runtime.kafka.embedded.fetch import Fetcher
from rollmill.runtime.kafka.embedded.lock import LOCK_PATH, ArtifactLock, load_lock
from rollmill.runtime.kafka.embedded.tools import ToolSettings


def relock(coordinates: tuple[str, ...], tools: ToolSettings, path: Path = LOCK_PATH) -> ArtifactLock:
    """Resolve ``coordinates``, download what they come to, and write the lock."""
    lock = Fetcher(tools.repository, tools.maven_on_path).resolve(coordinates)
    path.write_text(lock.model_dump_json(indent=2) + "\n")
    return lock


def main(arguments: list[str]) -> None:
    lock = relock(tuple(arguments) or load_lock().coordinates, ToolSettings())
    sys.stdout.write(f"{len(lock.artifacts)} jars of {', '.join(lock.coordinates)} locked\n")


if __name__ == "__main__":
    main(sys.argv[1:])
