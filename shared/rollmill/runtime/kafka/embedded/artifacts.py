"""The broker's class path: jars of the local Maven repository, fetched where missing, each checked against the lock."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.errors import ConfigurationError
from rollmill.runtime.kafka.embedded.lock import ArtifactLock, LockedArtifact, load_lock
from rollmill.runtime.kafka.embedded.tools import ToolSettings

log = logging.getLogger(__name__)


def class_path(tools: ToolSettings, lock: ArtifactLock | None = None) -> tuple[Path, ...]:
    """All jars of the broker. Once they are fetched this works offline, and costs one pass of SHA-256 over 45 MB.

    Raises ConfigurationError where a jar cannot be fetched or is not the locked one.
    """
    wanted = lock or load_lock()
    with _one_at_a_time(tools.repository):
        missing = wanted.missing(tools.repository)
        if missing:
            _fetch(missing, wanted, tools)
    return wanted.verified_paths(tools.repository)


def _fetch(missing: tuple[LockedArtifact, ...], lock: ArtifactLock, tools: ToolSettings) -> None:
    log.info("fetching %d of %d jars for %s", len(missing), len(lock.artifacts), lock.coordinates[0])
    try:
        from rollmill.runtime.kafka.embedded.fetch import Fetcher  # noqa: PLC0415 - jgo comes with an extra
    except ImportError as error:
        raise ConfigurationError(_advice(missing, "jgo is not installed")) from error
    try:
        Fetcher(tools.repository, tools.maven_on_path).fetch(missing)
    except (RuntimeError, OSError) as error:
        raise ConfigurationError(_advice(missing, str(error))) from error


def _advice(missing: tuple[LockedArtifact, ...], reason: str) -> str:
    return (
        f"{len(missing)} jars of Apache Kafka are not in the local Maven repository ({missing[0].coordinate} is the "
        "first) and could not be fetched. Needed once: `pip install rollmill[embedded]` and a Maven repository in "
        "reach (`mvn` on PATH is used with its settings). Or run against an existing cluster with "
        f"--bootstrap-servers.\nReason: {reason}"
    )


@contextmanager
def _one_at_a_time(repository: Path) -> Iterator[None]:
    """Two processes that start together on a fresh machine would download into the same files."""
    repository.mkdir(parents=True, exist_ok=True)
    with (repository / ".rollmill-kafka.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
