"""Groups by id, and the life of one: a transitions table and one function (rule A2).

A group's state is not stored while it is open: it follows from its members, the rules and the time at a cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rollmill.models import PolicyVersion, Trajectory


class GroupState(StrEnum):
    """``partial``: at least min-k graded members at the deadline, or the last cut before they grow stale."""

    OPEN = "open"
    COMPLETE = "complete"
    PARTIAL = "partial"
    CUT = "cut"
    EXPIRED = "expired"
    FAILED = "failed"


class GroupEvent(StrEnum):
    """What a cut finds out about a group."""

    FILLED = "filled"
    DEADLINE_WITH_ENOUGH = "deadline_with_enough"
    DEADLINE_WITH_TOO_FEW = "deadline_with_too_few"
    GROWING_STALE = "growing_stale"
    UNUSABLE = "unusable"
    """Too few graded members, no spread, or no trace left to train."""
    TAKEN = "taken"


TRANSITIONS: Mapping[tuple[GroupState, GroupEvent], GroupState] = {
    (GroupState.OPEN, GroupEvent.FILLED): GroupState.COMPLETE,
    (GroupState.OPEN, GroupEvent.DEADLINE_WITH_ENOUGH): GroupState.PARTIAL,
    (GroupState.OPEN, GroupEvent.GROWING_STALE): GroupState.PARTIAL,
    (GroupState.OPEN, GroupEvent.DEADLINE_WITH_TOO_FEW): GroupState.EXPIRED,
    (GroupState.COMPLETE, GroupEvent.UNUSABLE): GroupState.FAILED,
    (GroupState.PARTIAL, GroupEvent.UNUSABLE): GroupState.FAILED,
    (GroupState.COMPLETE, GroupEvent.TAKEN): GroupState.CUT,
    (GroupState.PARTIAL, GroupEvent.TAKEN): GroupState.CUT,
}
READY = frozenset({GroupState.COMPLETE, GroupState.PARTIAL})
CLOSED = frozenset({GroupState.CUT, GroupState.EXPIRED, GroupState.FAILED})


def moved(state: GroupState, event: GroupEvent) -> GroupState:
    """The state after ``event``. Raises ValueError for an event that cannot happen in ``state``."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a group that is {state.value} cannot be {event.value}") from None


@dataclass(frozen=True)
class Group:
    """The trajectories that wait for one group, sorted by (session, attempt), whatever order they came in.

    Immutable, so what every tick asks of it is computed once.
    """

    group_id: str
    members: tuple[Trajectory, ...] = ()

    def holding(self, session_id: str, attempt: int) -> Trajectory | None:
        found = (m for m in self.members if (m.session_id, m.attempt) == (session_id, attempt))
        return next(found, None)

    def joined(self, member: Trajectory) -> Group:
        """With ``member``; of two revisions of one attempt the higher number stays (rule M2)."""
        held = self.holding(member.session_id, member.attempt)
        if held is not None and revision_of(held) >= revision_of(member):
            return self
        others = [m for m in self.members if m is not held]
        ordered = sorted([*others, member], key=lambda m: (m.session_id, m.attempt))
        return Group(self.group_id, tuple(ordered))

    @cached_property
    def current(self) -> tuple[Trajectory, ...]:
        """The highest attempt of every session: a second attempt stands for the first (rule S2)."""
        newest = {member.session_id: member for member in self.members}
        return tuple(newest.values())

    @property
    def superseded(self) -> tuple[Trajectory, ...]:
        kept = {(member.session_id, member.attempt) for member in self.current}
        return tuple(m for m in self.members if (m.session_id, m.attempt) not in kept)

    @cached_property
    def size(self) -> int:
        """Members that the sessions announced; the largest number where they differ."""
        return max(member.spec.group_size for member in self.members)

    @cached_property
    def is_full(self) -> bool:
        return len(self.current) >= self.size

    @cached_property
    def opened_at(self) -> float:
        """Of the session that opened first, event time."""
        return min(member.opened_at for member in self.members)

    @cached_property
    def first_end(self) -> float:
        """When the first member ended, event time: the group's deadline counts from here."""
        return min(member.closed_at for member in self.members)

    @cached_property
    def last_end(self) -> float:
        return max(member.closed_at for member in self.members)

    @cached_property
    def oldest(self) -> PolicyVersion | None:
        """Of all trainable tokens of the current members; None where there is none."""
        versions = (trace.oldest_version for member in self.current for trace in member.traces)
        return min((version for version in versions if version is not None), default=None)

    @property
    def sessions(self) -> tuple[tuple[str, int], ...]:
        return tuple((member.session_id, member.attempt) for member in self.members)


def revision_of(trajectory: Trajectory) -> int:
    """None counts as the first revision: a producer that never revises."""
    return trajectory.revision or 0
