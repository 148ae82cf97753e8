"""Which of the ready groups make a step: whole groups, until their number, their tokens or the header is full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group import Group, GroupState
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.steps.step_table import table_bytes

LOOKED_AFTER = 256
"""Groups."""


@dataclass(frozen=True)
class Selection:
    """``full``: no further group fits."""

    taken: tuple[EvaluatedGroup, ...] = ()
    failed: tuple[EvaluatedGroup, ...] = ()
    full: bool = False


@dataclass(frozen=True)
class _Room:
    """What a step still has room for; None is no bound."""

    groups: int | None
    tokens: int | None
    nbytes: int
    is_untouched: bool = True

    def fits(self, group: EvaluatedGroup) -> bool:
        """A first group always does: alone it is as small a step as can be."""
        few = self.tokens is None or group.tokens <= self.tokens
        return self.is_untouched or (few and table_bytes(group) <= self.nbytes)

    def after(self, group: EvaluatedGroup) -> _Room:
        groups = None if self.groups is None else self.groups - 1
        tokens = None if self.tokens is None else self.tokens - group.tokens
        return _Room(groups, tokens, self.nbytes - table_bytes(group), is_untouched=False)

    @property
    def is_used_up(self) -> bool:
        return (self.groups is not None and self.groups <= 0) or (self.tokens is not None and self.tokens <= 0)


def selected(examined: Iterable[EvaluatedGroup], rules: BatcherConfig) -> Selection:
    """The first usable groups that a step has room for, and the failed ones before them. Looks no further."""
    taken: list[EvaluatedGroup] = []
    failed: list[EvaluatedGroup] = []
    room, full = _room(rules), False
    for group in examined:
        if group.state is GroupState.FAILED:
            failed.append(group)
        elif room.fits(group):
            taken.append(group)
            room = room.after(group)
            full = room.is_used_up
        else:
            full = True
        if full:
            break
    return Selection(tuple(taken), tuple(failed), full)


def looked_after(waiting: Sequence[Group], sequence: int) -> Sequence[Group]:
    """The next `LOOKED_AFTER` of the groups that a full step has not reached, by the number of its cut.

    In an order by age, groups that nothing can train any more may stand behind those that fill every step. So each
    cut looks after some, round and round, and its cost does not grow with what waits.
    """
    if len(waiting) <= LOOKED_AFTER:
        return waiting
    start = sequence * LOOKED_AFTER % len(waiting)
    return [*waiting[start : start + LOOKED_AFTER], *waiting[: max(0, start + LOOKED_AFTER - len(waiting))]]


def _room(rules: BatcherConfig) -> _Room:
    groups = rules.groups_per_step if rules.tokens_per_step is None else None
    return _Room(groups, rules.tokens_per_step, rules.header_bytes)
