"""Which of the ready groups make a step: whole groups in a given order, until a limit of the step is reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollmill_batcher.groups.config import BatcherConfig, StepOrder
from rollmill_batcher.groups.group import GroupState, RolloutGroup
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.groups.staleness import UNANNOUNCED, PolicyClock
from rollmill_batcher.steps.step_table import table_bytes

CLEANUP_GROUPS = 256
"""Waiting groups behind a full step that each cut evaluates, to close those that failed."""


@dataclass(frozen=True)
class Selection:
    """``full``: no further group fits."""

    taken: tuple[EvaluatedGroup, ...] = ()
    failed: tuple[EvaluatedGroup, ...] = ()
    full: bool = False


@dataclass(frozen=True)
class _Remaining:
    """What may still be added to a step; None is no limit."""

    groups: int | None
    tokens: int | None
    nbytes: int
    is_untouched: bool = True

    @classmethod
    def at_first(cls, config: BatcherConfig) -> _Remaining:
        groups = config.groups_per_step if config.tokens_per_step is None else None
        return cls(groups, config.tokens_per_step, config.header_bytes)

    def fits(self, group: EvaluatedGroup) -> bool:
        """A first group always does: alone it makes the smallest step that there can be."""
        few = self.tokens is None or group.tokens <= self.tokens
        return self.is_untouched or (few and table_bytes(group) <= self.nbytes)

    def after(self, group: EvaluatedGroup) -> _Remaining:
        groups = None if self.groups is None else self.groups - 1
        tokens = None if self.tokens is None else self.tokens - group.tokens
        return _Remaining(groups, tokens, self.nbytes - table_bytes(group), is_untouched=False)

    @property
    def is_used_up(self) -> bool:
        return (self.groups is not None and self.groups <= 0) or (self.tokens is not None and self.tokens <= 0)


def select_groups(evaluated: Iterable[EvaluatedGroup], config: BatcherConfig) -> Selection:
    """The first usable groups that fit into a step, and the failed ones before them. Evaluates no further group."""
    taken: list[EvaluatedGroup] = []
    failed: list[EvaluatedGroup] = []
    remaining, full = _Remaining.at_first(config), False
    for group in evaluated:
        if group.state is GroupState.FAILED:
            failed.append(group)
        elif remaining.fits(group):
            taken.append(group)
            remaining = remaining.after(group)
            full = remaining.is_used_up
        else:
            full = True
        if full:
            break
    return Selection(tuple(taken), tuple(failed), full)


def cleanup_window(waiting: Sequence[RolloutGroup], sequence: int) -> Sequence[RolloutGroup]:
    """The next `CLEANUP_GROUPS` of the groups that a full step has not reached, by the sequence number of its cut.

    In an order by age, groups that cannot train any more may come after those that fill every step. So each cut
    evaluates some of them, in turn, and its cost does not grow with the number that waits.
    """
    if len(waiting) <= CLEANUP_GROUPS:
        return waiting
    start = sequence * CLEANUP_GROUPS % len(waiting)
    return [*waiting[start : start + CLEANUP_GROUPS], *waiting[: max(0, start + CLEANUP_GROUPS - len(waiting))]]


def order_groups(groups: Sequence[RolloutGroup], order: StepOrder, clock: PolicyClock, seed: int) -> list[RolloutGroup]:
    """``groups`` by ``order``; equal ones by opening and id. A pure function of its arguments.

    Groups over the staleness limit are among them: they fail when they are evaluated.
    """
    first = sorted(groups, key=lambda group: (group.opened_at, group.group_id))
    if order is StepOrder.FRESHEST:
        return sorted(first, key=lambda group: _age(group, clock))
    if order is StepOrder.OLDEST_IN_WINDOW:
        return sorted(first, key=lambda group: -_age(group, clock))
    return _stratified(first, clock, seed) if order is StepOrder.STRATIFIED else first


def _stratified(groups: Sequence[RolloutGroup], clock: PolicyClock, seed: int) -> list[RolloutGroup]:
    """Member i of a shuffled stratum of n sorts at (i + 1/2) / n: any prefix holds each age in proportion."""
    strata: dict[int, list[RolloutGroup]] = {}
    for group in groups:
        strata.setdefault(_age(group, clock), []).append(group)
    draw = np.random.default_rng(seed)
    ranked = [
        ((position + 0.5) / len(members), age, members[index])
        for age, members in sorted(strata.items())
        for position, index in enumerate(draw.permutation(len(members)))
    ]
    return [group for _, _, group in sorted(ranked, key=lambda entry: entry[:2])]


def _age(group: RolloutGroup, clock: PolicyClock) -> int:
    return clock.age(group.oldest_version or UNANNOUNCED)
