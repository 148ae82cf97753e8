"""Admission from staleness: how many rollouts may be under way, so that none is too old when it is trained. Pure.

Decided only when a session opens, for whole groups (rule A11). The formula is AReaL's:

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * per_version - (accepted + running))

in trajectories. ``accepted`` there counts what has finished since the first version, of which every version is taken to
consume ``per_version``; so it drifts from the truth where a trajectory is excluded or the counter is lost. Here it is
counted from what is known to wait: accepted = version * per_version + waiting. With nothing running after a restart at
version 100 that is the right capacity, and what was excluded makes room like what was trained.

``running``: slots of groups with a session open; a group holds all its slots from its first session on, each until its
session closes, expires or passes its deadline. ``waiting``: closed sessions with sampled tokens that have no
disposition yet, by the topic ``outcomes``, read from its end at the start: what closed before a restart is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from rollmill.errors import BackpressureError
from rollmill.models import (
    Disposition,
    PolicyVersion,
    Purpose,
    SessionEntry,
    SessionSpec,
    SessionState,
    TokenDisposition,
)

RETRY_SECONDS = 5.0
UNSEEN_SECONDS = 60.0
"""A closed session without a report of its tokens for this long had none."""
MOST_UNASSIGNED = 10_000
"""Sessions outside of groups with tokens that are remembered."""


class AdmissionLimits(BaseModel):
    """Of one policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_staleness: NonNegativeInt
    """Most versions between sampling and training; as the batcher's."""
    per_version: PositiveInt
    """Trajectories that one version consumes: groups per step, times the group's size, times steps per version."""
    max_concurrent: PositiveInt | None = None
    """Most trajectories under way, whatever the staleness; None: no limit."""


class NoCapacityError(BackpressureError):
    """A group may not start now."""


def capacity(limits: AdmissionLimits, *, version: int, accepted: int, running: int) -> int:
    """Trajectories that may start now; negative where too many are under way."""
    by_staleness = (limits.max_staleness + version + 1) * limits.per_version - (accepted + running)
    return by_staleness if limits.max_concurrent is None else min(limits.max_concurrent - running, by_staleness)


@dataclass
class _Tokens:
    """Of one session: sampled, and with a final disposition."""

    captured: int = 0
    disposed: int = 0


@dataclass
class _Group:
    size: int
    deadline: float
    open: dict[str, float] = field(default_factory=dict)
    """Session id to its deadline."""
    closed: dict[str, float] = field(default_factory=dict)
    """Session id to the time when it was seen to close."""

    def running(self, now: float) -> int:
        """Slots that are in use or kept for members that have not come yet."""
        alive = sum(deadline > now for deadline in self.open.values())
        to_come = max(self.size - len(self.open) - len(self.closed), 0) if self.deadline > now else 0
        return alive + to_come

    @property
    def members(self) -> int:
        return len(self.open) + len(self.closed)


class Admission:
    """Counts what is under way of the policies in ``limits``; of the others anything is admitted."""

    def __init__(self, limits: Mapping[str, AdmissionLimits], newest: Callable[[str], PolicyVersion]) -> None:
        self._limits = limits
        self._newest = newest
        self._groups: dict[tuple[str, str], _Group] = {}
        self._tokens: dict[str, _Tokens] = {}
        """Of members of groups."""
        self._unassigned: dict[str, _Tokens] = {}
        """Of sessions that are no members, or not known to be: a disposition may be read before its session is."""

    def admit(self, session_id: str, spec: SessionSpec, now: float) -> None:
        """Keep the slots of the session's group. Raises NoCapacityError."""
        limits = self._limits_of(spec)
        if limits is None:
            return
        group = self._groups.get(_name(session_id, spec))
        wanted = spec.group_size if group is None else 1
        if group is not None and (session_id in group.open or group.members < group.size):
            return
        room, counted = self.capacity(spec.policy, now), self._counted(spec.policy, now)
        if room < wanted and counted:
            raise NoCapacityError(
                f"policy {spec.policy!r} has room for {max(room, 0)} more trajectories and the group needs {wanted}: "
                f"{counted} are under way or wait to be trained (max_staleness {limits.max_staleness}, "
                f"{limits.per_version} per version)",
                retry_after=RETRY_SECONDS,
            )
        self._groups.setdefault(_name(session_id, spec), _Group(spec.group_size, now + spec.deadline_seconds))

    def is_limited(self, spec: SessionSpec) -> bool:
        """Whether sessions like this are limited at all."""
        return self._limits_of(spec) is not None

    def withdraw(self, session_id: str, spec: SessionSpec) -> None:
        """A session that was admitted did not open."""
        group = self._groups.get(_name(session_id, spec))
        if group is not None and not group.members:
            del self._groups[_name(session_id, spec)]

    def observe(self, entry: SessionEntry, now: float) -> None:
        """A session opened or closed, here or at another replica."""
        if self._limits_of(entry.spec) is None:
            return
        name, deadline = _name(entry.session_id, entry.spec), entry.opened_at + entry.spec.deadline_seconds
        if entry.state is SessionState.OPEN:
            self._tokens.setdefault(entry.session_id, self._unassigned.pop(entry.session_id, _Tokens()))
            group = self._groups.setdefault(name, _Group(entry.spec.group_size, deadline))
            group.closed.pop(entry.session_id, None)
            group.open[entry.session_id] = deadline
        elif name in self._groups:
            self._groups[name].open.pop(entry.session_id, None)
            self._groups[name].closed[entry.session_id] = now

    def count_tokens(self, outcome: TokenDisposition) -> None:
        """Count sampled tokens, or their final disposition."""
        if not self._groups or outcome.disposition is Disposition.REOPENED:
            return
        tokens = self._tokens.get(outcome.session_id) or self._tokens_before(outcome.session_id)
        if outcome.disposition is Disposition.CAPTURED:
            tokens.captured += outcome.tokens
        else:
            tokens.disposed += outcome.tokens

    def _tokens_before(self, session_id: str) -> _Tokens:
        """Of a session that is not known to be a member; the longest kept go first."""
        tokens = self._unassigned.setdefault(session_id, _Tokens())
        if len(self._unassigned) > MOST_UNASSIGNED:
            del self._unassigned[next(iter(self._unassigned))]
        return tokens

    def mark_caught_up(self) -> None:
        """Everything that was written before is seen: what closed then is not waited for."""
        for group in self._groups.values():
            group.closed = dict.fromkeys(group.closed, float("-inf"))

    def capacity(self, policy: str, now: float) -> int:
        """Trajectories of the policy that may start now."""
        self.forget_ended(now)
        limits, version = self._limits[policy], self._newest(policy).version
        groups = [group for (owner, _), group in self._groups.items() if owner == policy]
        waiting = sum(self._waits(session, group.closed[session], now) for group in groups for session in group.closed)
        return capacity(
            limits,
            version=version,
            accepted=version * limits.per_version + waiting,
            running=sum(group.running(now) for group in groups),
        )

    def _counted(self, policy: str, now: float) -> int:
        groups = [group for (owner, _), group in self._groups.items() if owner == policy]
        waiting = sum(self._waits(session, at, now) for group in groups for session, at in group.closed.items())
        return waiting + sum(group.running(now) for group in groups)

    def _waits(self, session_id: str, closed_at: float, now: float) -> bool:
        tokens = self._tokens.get(session_id)
        if tokens is None or not (tokens.captured or tokens.disposed):
            return now - closed_at < UNSEEN_SECONDS
        return tokens.disposed < tokens.captured

    def forget_ended(self, now: float) -> None:
        """Forget groups with nothing running or waiting."""
        for name, group in list(self._groups.items()):
            waits = any(self._waits(session, at, now) for session, at in group.closed.items())
            if not waits and not group.running(now):
                for session in (*group.closed, *group.open):
                    self._tokens.pop(session, None)
                del self._groups[name]

    def _limits_of(self, spec: SessionSpec) -> AdmissionLimits | None:
        """None: sessions like this are not counted."""
        return self._limits.get(spec.policy) if spec.purpose is Purpose.TRAIN else None


def _name(session_id: str, spec: SessionSpec) -> tuple[str, str]:
    """Policy and group; a session without a group is one of its own."""
    return spec.policy, f"/{session_id}" if spec.group_id is None else spec.group_id
