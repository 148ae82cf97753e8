"""A buffer of trajectories by age, and the seeded draws from it."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, TypeVar

from rollmill.errors import InvalidInputError
from rollmill.trainer.flux.partial import PartialTrajectory
from rollmill.trainer.flux.trajectory import Trajectory, TrajectoryStatus
from rollmill.trainer.flux.versions import NO_FORKS, AnyVersion, PolicyVersion, gap

T = TypeVar("T")

FINISHED = {TrajectoryStatus.COMPLETED, TrajectoryStatus.TRUNCATED}


@dataclass(frozen=True)
class _Entry:
    key: str
    trajectory: Trajectory

    @property
    def age_order(self) -> tuple[PolicyVersion, str]:
        return self.trajectory.version, self.key


@dataclass
class TrajectoryBuffer:
    """Finished trajectories and, separately, partial ones. Safe for several threads.

    Results depend on the contents and on seeds, never on the order of adding. Every method measures staleness against
    the version that its caller passes. A full buffer drops the oldest version first, and counts it.
    """

    max_size: int = 10000
    """Of finished and of partial trajectories, each."""
    max_staleness: int = 5
    """Versions, inclusive."""
    seed: int = 0
    """For draws without their own seed; each of these draws differs."""
    forks: Mapping[int, int] = field(default_factory=lambda: NO_FORKS)
    """The version that each later epoch was resumed from."""
    evicted: int = 0
    """Dropped because the buffer was full."""
    _finished: list[_Entry] = field(default_factory=list, repr=False)
    _partial: list[_Entry] = field(default_factory=list, repr=False)
    _draws: int = field(default=0, repr=False)
    _current: PolicyVersion | None = field(default=None, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def __len__(self) -> int:
        """Finished ones."""
        return len(self._finished)

    def add(self, trajectory: Trajectory) -> bool:
        """False, and nothing changes, where one with this id is in the buffer.

        Raises InvalidInputError for what is neither finished nor an aborted `PartialTrajectory`, AlignmentError where
        its fields contradict each other.
        """
        trajectory.check()
        with self._lock:
            entries = self._entries_for(trajectory)
            if trajectory.id and any(entry.trajectory.id == trajectory.id for entry in entries):
                return False
            entries.append(_Entry(_key(trajectory), trajectory))
            if len(entries) > self.max_size:
                entries.remove(min(entries, key=lambda entry: entry.age_order))
                self.evicted += 1
            return True

    def add_batch(self, trajectories: Iterable[Trajectory]) -> int:
        """How many were added."""
        return sum(self.add(trajectory) for trajectory in trajectories)

    def get_available(self, current_version: AnyVersion, max_staleness: int | None = None) -> list[Trajectory]:
        """Finished trajectories within the limit (inclusive), oldest version first, then by id."""
        with self._lock:
            return [entry.trajectory for entry in self._available(current_version, max_staleness)]

    def get_partials(self, current_version: AnyVersion, max_continuations: int = 3) -> list[PartialTrajectory]:
        """Those within the limit that may be continued, oldest version first."""
        with self._lock:
            fresh = self._fresh(self._partial, current_version, self.max_staleness)
        partials = [entry.trajectory for entry in fresh if isinstance(entry.trajectory, PartialTrajectory)]
        return [partial for partial in partials if partial.can_continue(max_continuations)]

    def sample(
        self, n: int, current_version: AnyVersion, stratified: bool = True, seed: Hashable = None
    ) -> list[Trajectory]:
        """``min(n, available)`` different trajectories; they stay in the buffer, `take` removes them.

        Stratified: each staleness gets its share of ``n``, rounded down or up. Each trajectory is as likely as any
        other either way. The same contents and seed give the same sample.
        """
        with self._lock:
            return [entry.trajectory for entry in self._draw(n, current_version, stratified, seed)]

    def take(
        self, n: int, current_version: AnyVersion, stratified: bool = True, seed: Hashable = None
    ) -> list[Trajectory]:
        """Like `sample`, and removes them, so that each is trained once."""
        with self._lock:
            drawn = self._draw(n, current_version, stratified, seed)
            removed = set(map(id, drawn))
            self._finished = [entry for entry in self._finished if id(entry) not in removed]
            return [entry.trajectory for entry in drawn]

    def remove_stale(self, current_version: AnyVersion) -> int:
        """Remove what is beyond the limit, partial ones too; how many those were."""
        with self._lock:
            before = len(self._finished) + len(self._partial)
            self._finished = self._fresh(self._finished, current_version, self.max_staleness)
            self._partial = self._fresh(self._partial, current_version, self.max_staleness)
            return before - len(self._finished) - len(self._partial)

    def clear(self) -> None:
        with self._lock:
            self._finished, self._partial = [], []

    def get_stats(self, current_version: AnyVersion | None = None) -> dict[str, Any]:
        """``size``, ``partial_size``, ``mean_staleness``, ``max_staleness``, ``min_version``, ``max_version``,
        ``evicted``.

        Staleness is against ``current_version``, else against the version that a caller passed last; None where no
        version was passed or the buffer is empty.
        """
        with self._lock:
            current = self._current if current_version is None else PolicyVersion.of(current_version)
            versions = [entry.trajectory.version for entry in self._finished]
            gaps = [] if current is None else [gap(version, current, self.forks) for version in versions]
            return {
                "size": len(versions),
                "partial_size": len(self._partial),
                "mean_staleness": sum(gaps) / len(gaps) if gaps else None,
                "max_staleness": max(gaps, default=None),
                "min_version": min(versions).version_id if versions else None,
                "max_version": max(versions).version_id if versions else None,
                "evicted": self.evicted,
            }

    def _entries_for(self, trajectory: Trajectory) -> list[_Entry]:
        if trajectory.status in FINISHED:
            return self._finished
        if isinstance(trajectory, PartialTrajectory) and trajectory.status is TrajectoryStatus.ABORTED:
            return self._partial
        raise InvalidInputError(
            f"trajectory {trajectory.id!r} is {trajectory.status.value}: a buffer takes finished ones, and "
            "aborted ones as PartialTrajectory"
        )

    def _available(self, current: AnyVersion, limit: int | None) -> list[_Entry]:
        return self._fresh(self._finished, current, self.max_staleness if limit is None else limit)

    def _fresh(self, entries: list[_Entry], current: AnyVersion, limit: int) -> list[_Entry]:
        self._current = PolicyVersion.of(current)
        fresh = [entry for entry in entries if gap(entry.trajectory.version, self._current, self.forks) <= limit]
        return sorted(fresh, key=lambda entry: entry.age_order)

    def _draw(self, n: int, current: AnyVersion, stratified: bool, seed: Hashable) -> list[_Entry]:
        if seed is None:
            self._draws += 1
            seed = (self.seed, self._draws)
        available = self._available(current, None)
        candidates = [
            Candidate(entry.key, gap(entry.trajectory.version, current, self.forks), entry) for entry in available
        ]
        return draw(candidates, n, seed, stratified=stratified)


def _key(trajectory: Trajectory) -> str:
    """The id; without one, a digest of the contents, so that two with one key are equal."""
    return trajectory.id or hashlib.blake2b(repr(trajectory.to_dict()).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """``key`` orders candidates; two with one key have to be equal. ``stratum``: the group that gets its share of a
    draw.
    """

    key: str
    stratum: int
    item: T


def draw(candidates: Sequence[Candidate[T]], n: int, seed: Hashable, *, stratified: bool) -> list[T]:
    """``min(n, N)`` different candidates of N, each with probability n / N, in random order.

    Stratified: systematic sampling over the candidates laid out stratum by stratum, shuffled within each (Cochran,
    *Sampling Techniques*, chapter 8). A stratum with the share s of the candidates gets n s, rounded down or up.
    """
    rng = random.Random(repr(seed))  # noqa: S311  # for reproducible draws, not for secrets
    ordered = sorted(candidates, key=lambda each: (each.stratum, each.key))
    n = min(max(n, 0), len(ordered))
    chosen = _systematic(ordered, n, rng) if stratified else rng.sample(ordered, n)
    rng.shuffle(chosen)
    return [each.item for each in chosen]


def _systematic(ordered: Sequence[Candidate[T]], n: int, rng: random.Random) -> list[Candidate[T]]:
    ordered_strata: list[Candidate[T]] = []
    for _, stratum in groupby(ordered, key=lambda each: each.stratum):
        members = list(stratum)
        rng.shuffle(members)
        ordered_strata += members
    # Integer arithmetic: with floats the last index could be N.
    offset = rng.randrange(len(ordered_strata)) if ordered_strata else 0
    return [ordered_strata[(offset + index * len(ordered_strata)) // n] for index in range(n)]
