"""In which order waiting groups are offered to a step. A pure function of the groups, the clock and the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill_batcher.groups.config import StepOrder
from rollmill_batcher.groups.group import Group
from rollmill_batcher.groups.staleness import UNANNOUNCED, PolicyClock


def ordered(groups: Sequence[Group], order: StepOrder, clock: PolicyClock, seed: int) -> list[Group]:
    """``groups`` by ``order``; equal ones by opening and id. What is over the limit is found out when it is judged."""
    first = sorted(groups, key=lambda group: (group.opened_at, group.group_id))
    if order is StepOrder.FRESHEST:
        return sorted(first, key=lambda group: _age(group, clock))
    if order is StepOrder.OLDEST_IN_WINDOW:
        return sorted(first, key=lambda group: -_age(group, clock))
    return _stratified(first, clock, seed) if order is StepOrder.STRATIFIED else first


def _stratified(groups: Sequence[Group], clock: PolicyClock, seed: int) -> list[Group]:
    """Member i of a shuffled stratum of n stands at (i + 1/2) / n: any first part holds each age in proportion."""
    strata: dict[int, list[Group]] = {}
    for group in groups:
        strata.setdefault(_age(group, clock), []).append(group)
    draw = np.random.default_rng(seed)
    places = [
        ((place + 0.5) / len(members), age, members[index])
        for age, members in sorted(strata.items())
        for place, index in enumerate(draw.permutation(len(members)))
    ]
    return [group for _, _, group in sorted(places, key=lambda entry: entry[:2])]


def _age(group: Group, clock: PolicyClock) -> int:
    return clock.age(group.oldest or UNANNOUNCED)
