"""Policy versions with Flux's names, mapped onto the pipeline's (epoch, version)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import total_ordering
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from rollmill import models

NO_FORKS: Mapping[int, int] = MappingProxyType({})


@total_ordering
@dataclass(frozen=True, eq=False)
class PolicyVersion:
    """A version of a policy. Only ``epoch`` and ``version_id`` decide equality and order."""

    version_id: int = 0
    """The pipeline's version within the epoch."""
    timestamp: float = 0.0
    """Seconds since the Unix epoch at which it was announced; for information."""
    step: int = 0
    """Optimizer step that made it; for information."""
    epoch: int = field(default=0, kw_only=True)
    """Counts loaded checkpoints. Equal ids of different epochs are different policies."""

    @classmethod
    def of(cls, version: AnyVersion) -> Self:
        """From a plain id (of epoch 0), a version of the pipeline, or a view."""
        if isinstance(version, PolicyVersion):
            return cls(version.version_id, version.timestamp, version.step, epoch=version.epoch)
        if isinstance(version, int):
            return cls(version)
        return cls(version[1], epoch=version[0])

    @property
    def policy(self) -> models.PolicyVersion:
        """The version of the pipeline that this is a view of."""
        return models.PolicyVersion(self.epoch, self.version_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PolicyVersion) and self.policy == other.policy

    def __lt__(self, other: PolicyVersion) -> bool:
        return self.policy < other.policy

    def __hash__(self) -> int:
        return hash(self.policy)

    def to_dict(self) -> dict[str, Any]:
        return {"version_id": self.version_id, "timestamp": self.timestamp, "step": self.step, "epoch": self.epoch}


AnyVersion: TypeAlias = "PolicyVersion | tuple[int, int] | int"
"""A view, a version of the pipeline, or a plain version id of epoch 0."""


def gap(sampled: PolicyVersion, current: AnyVersion, forks: Mapping[int, int] = NO_FORKS) -> int:
    """Staleness of ``sampled`` for a trainer at ``current``; negative where it is newer. See `models.staleness`."""
    return models.staleness(sampled.policy, PolicyVersion.of(current).policy, forks)


@dataclass(frozen=True)
class VersionSegment:
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a trajectory, all sampled by ``version``."""

    start: int
    end: int
    version: PolicyVersion

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a segment has at least one token: {self.start} to {self.end}")

    @property
    def length(self) -> int:
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "version": self.version.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["start"], data["end"], PolicyVersion(**data["version"]))
