"""Brings the broker's jars into the local Maven repository, through jgo. Needs the ``embedded`` extra.

Both top coordinates are resolved "raw". Otherwise jgo imports them as bills of materials, and the parent of log4j,
which manages a test dependency on kafka-clients 3.9, downgrades the broker's own client jar.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jgo.maven import Artifact, Dependency, MavenContext, MvnResolver, PythonResolver, Resolver

from rollmill.runtime.kafka.embedded.lock import ArtifactLock, LockedArtifact, sha256_of

PARALLEL_DOWNLOADS = 8


class Fetcher(NamedTuple):
    """Where jars go, and Maven if there is one: it alone honours a user's mirrors; jgo's own code needs no Maven."""

    repository: Path
    maven: Path | None

    def fetch(self, artifacts: Iterable[LockedArtifact]) -> None:
        """Download exactly these, or raise RuntimeError or OSError."""
        dependencies = self._dependencies(artifact.coordinate for artifact in artifacts)
        if self.maven is not None:
            # One call for all of them; artifact by artifact Maven would be started dozens of times.
            dependencies[0].context.resolver.resolve(dependencies)
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(_download, dependencies))

    def resolve(self, coordinates: tuple[str, ...]) -> ArtifactLock:
        """Follow the dependencies of ``coordinates`` and hash what they come to."""
        dependencies = self._dependencies(coordinates)
        roots, transitive = dependencies[0].context.resolver.resolve(dependencies)
        locked = sorted(map(_locked, (*roots, *transitive)), key=lambda artifact: artifact.coordinate)
        return ArtifactLock(coordinates=coordinates, artifacts=tuple(locked))

    def _dependencies(self, coordinates: Iterable[str]) -> list[Dependency]:
        context = MavenContext(resolver=self._resolver(), repo_cache=self.repository)
        return [context.create_dependency(f"{coordinate}!") for coordinate in coordinates]

    def _resolver(self) -> Resolver:
        return MvnResolver(self.maven) if self.maven is not None else PythonResolver()


def _download(dependency: Dependency) -> Path:
    artifact: Artifact = dependency.artifact
    return artifact.resolve()


def _locked(dependency: Dependency) -> LockedArtifact:
    digest = sha256_of(_download(dependency))
    return LockedArtifact(
        group=dependency.groupId, artifact=dependency.artifactId, version=dependency.version, sha256=digest
    )
