"""Policy versions: (epoch, version), their run lengths over tokens, and staleness (rules R1, A4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollmill.models.base import EventTime, Identifier, NonNegativeInt, PositiveInt, Record

LARGEST_VERSION = 2**31 - 1
"""Batches hold epochs and versions as int32."""
VersionNumber = Annotated[NonNegativeInt, Field(le=LARGEST_VERSION)]


class PolicyVersion(NamedTuple):
    """A version of a policy. Equal numbers of different epochs are different policies.

    On the wire it is the pair ``[epoch, version]``. Before anything is announced the version is ``(0, 0)``.
    """

    epoch: VersionNumber = 0
    version: VersionNumber = 0

    def __str__(self) -> str:
        return f"{self.epoch}:{self.version}"


def skips_epochs(version: PolicyVersion, newest: PolicyVersion | None) -> bool:
    """Whether no announcement of ``version`` may follow ``newest`` (rule R1). None: nothing was announced before."""
    return newest is not None and version.epoch > newest.epoch + 1


class VersionRun(NamedTuple):
    """``length`` consecutive tokens of one version. Wire form ``[version or null, length]``.

    ``version`` is None for context tokens, which no policy sampled.
    """

    version: PolicyVersion | None
    length: PositiveInt


VersionRuns = Annotated[tuple[VersionRun, ...], Field(description="run lengths over tokens, in order")]


def run_lengths(versions: Iterable[PolicyVersion | None]) -> VersionRuns:
    """Run-length form of one version per token."""
    runs: list[VersionRun] = []
    for version in versions:
        append_run(runs, version, 1)
    return tuple(runs)


def append_run(runs: list[VersionRun], version: PolicyVersion | None, length: int) -> None:
    """Extend ``runs`` in place by ``length`` tokens of ``version``; equal neighbours melt together."""
    if not length:
        return
    if runs and runs[-1].version == version:
        runs[-1] = VersionRun(version, runs[-1].length + length)
    else:
        runs.append(VersionRun(version, length))


def total_length(runs: VersionRuns) -> int:
    return sum(run.length for run in runs)


def expand(runs: VersionRuns) -> npt.NDArray[np.int32]:
    """Two columns [T, 2] int32, epoch and version per token; context tokens are (-1, -1)."""
    rows = np.array([run.version or (-1, -1) for run in runs], dtype=np.int32).reshape(-1, 2)
    return np.repeat(rows, [run.length for run in runs], axis=0)


def trained_versions(runs: VersionRuns, mask: npt.NDArray[np.uint8]) -> dict[PolicyVersion, int]:
    """Number of tokens with mask 1 by version. Context tokens never count, whatever their label."""
    counts: dict[PolicyVersion, int] = {}
    start = 0
    for version, length in runs:
        trained = int(mask[start : start + length].sum())
        start += length
        if version is not None and trained:
            counts[version] = counts.get(version, 0) + trained
    return counts


def staleness(sampled: PolicyVersion, current: PolicyVersion, forks: Mapping[int, int]) -> int:
    """Versions between ``sampled`` and ``current`` (rule A4).

    ``forks[e]`` is the version from which epoch ``e`` went on; without one it went on from 0. Within an epoch: c - r.
    For a record of an older epoch with version r, fork point f (the lowest on the way to the current epoch): c - r if
    r <= f, else (c - f) + (r - f). A record of a newer epoch or version than ``current`` gives a negative number. The
    cost grows with the number of forks, and not with that of epochs, which anybody may write.
    """
    if sampled.epoch >= current.epoch:
        return current.version - sampled.version
    between = [version for epoch, version in forks.items() if sampled.epoch < epoch <= current.epoch]
    fork = min(between) if len(between) == current.epoch - sampled.epoch else 0
    if sampled.version <= fork:
        return current.version - sampled.version
    return (current.version - fork) + (sampled.version - fork)


class StalenessBasis(StrEnum):
    """Of which trained tokens of a trace the age counts."""

    OLDEST = "oldest"
    NEWEST = "newest"
    MEAN = "mean"


def token_ages(tokens: Mapping[PolicyVersion, int], current: PolicyVersion, forks: Mapping[int, int]) -> dict[int, int]:
    """Tokens by staleness, from tokens by version."""
    ages: dict[int, int] = {}
    for version, count in tokens.items():
        age = staleness(version, current, forks)
        ages[age] = ages.get(age, 0) + count
    return ages


def trace_age(ages: Mapping[int, int], basis: StalenessBasis) -> float:
    """Age of a trace from its trained tokens by age; the mean weighs every token once.

    A trace without trained tokens has no age: ``ages`` must not be empty.
    """
    if basis is StalenessBasis.MEAN:
        return sum(age * tokens for age, tokens in ages.items()) / sum(ages.values())
    return max(ages) if basis is StalenessBasis.OLDEST else min(ages)


class PolicySpan(Record):
    """The versions announced before and after a call; ``before`` counts for staleness (rule R1)."""

    name: Identifier = "policy"
    before: PolicyVersion = PolicyVersion()
    after: PolicyVersion = PolicyVersion()


class PolicyAnnouncement(Record):
    """The trainer's announcement that every engine has loaded a version (topic ``policies``)."""

    policy: Identifier = "policy"
    version: PolicyVersion
    resumed_from: NonNegativeInt | None = None
    """Version of the checkpoint that this epoch went on from; None in the first epoch."""
    run: Identifier = "run"
    at: EventTime
    metadata: dict[str, str] = Field(default_factory=dict)
