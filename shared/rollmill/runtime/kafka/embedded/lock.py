"""The committed list of every jar of the broker: coordinates and SHA-256.

A resolver decides anew on every machine what "transitive" means, and jgo only warns when a checksum differs; this
list decides once. ``python -m rollmill.runtime.kafka.embedded.relock`` writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rollmill.errors import ConfigurationError

LOCK_PATH = Path(__file__).with_name("kafka.lock.json")


class LockedArtifact(BaseModel):
    """One jar, as Maven names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str
    artifact: str
    version: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    def path(self, repository: Path) -> Path:
        """Where a local Maven repository keeps it, present or not."""
        directory = repository.joinpath(*self.group.split("."), self.artifact, self.version)
        return directory / f"{self.artifact}-{self.version}.jar"


class ArtifactLock(BaseModel):
    """The requested artifacts (``coordinates``) and all that they resolve to (``artifacts``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    coordinates: tuple[str, ...]
    artifacts: tuple[LockedArtifact, ...]

    def missing(self, repository: Path) -> tuple[LockedArtifact, ...]:
        return tuple(artifact for artifact in self.artifacts if not artifact.path(repository).is_file())

    def verified_paths(self, repository: Path) -> tuple[Path, ...]:
        """Paths of all jars, after each was hashed; raises ConfigurationError that names the ones that differ."""
        wrong = [artifact for artifact in self.artifacts if sha256_of(artifact.path(repository)) != artifact.sha256]
        if wrong:
            raise ConfigurationError(_mismatch(wrong, repository))
        return tuple(artifact.path(repository) for artifact in self.artifacts)


def load_lock(path: Path = LOCK_PATH) -> ArtifactLock:
    """Read the lock that ships with this package."""
    return ArtifactLock.model_validate_json(path.read_bytes())


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(wrong: Iterable[LockedArtifact], repository: Path) -> str:
    lines = "\n".join(f"  {artifact.coordinate}  {artifact.path(repository)}" for artifact in wrong)
    return (
        f"These jars of Apache Kafka are not the locked ones (SHA-256 differs):\n{lines}\n"
        "An interrupted download leaves such a file: delete them and start again. If they come back the same, the "
        "repository that serves them is not to be trusted."
    )
