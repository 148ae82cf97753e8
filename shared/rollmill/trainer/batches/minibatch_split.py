"""How a step is divided into mini-batches: a function of its table, so every rank has the same result (rule A13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollmill.models import TraceRow

Rollout = tuple[str, int]


@dataclass(frozen=True)
class MiniBatchPlan:
    """One mini-batch: rows of the step's table by rank and micro-batch, the same number of these on every rank."""

    rows: tuple[int, ...]
    """All of them, over all ranks."""
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """By rank and micro-batch; an empty one is a filler."""


def divide(table: Sequence[TraceRow], kept: Sequence[bool], partitions: int, ranks: int, n: int) -> list[MiniBatchPlan]:
    """``n`` mini-batches of whole rollouts, or fewer where there are fewer rollouts.

    Their numbers of rollouts differ by one at most, and their tokens are balanced. Rows that are not kept are in no
    mini-batch. ``partitions``: how many each of the ``ranks`` reads. No micro-batch is larger than the step's largest.
    """
    rollouts: dict[Rollout, list[int]] = {}
    for number, row in enumerate(table):
        if kept[number]:
            rollouts.setdefault((row.session_id, row.attempt), []).append(number)
    budget = _largest_micro_batch(table)
    return [
        _part(table, rows, partitions, ranks, budget) for rows in _assign_rollouts(table, list(rollouts.values()), n)
    ]


def _largest_micro_batch(table: Sequence[TraceRow]) -> int:
    tokens: dict[tuple[int, int], int] = {}
    for row in table:
        key = (row.rank, row.micro_batch)
        tokens[key] = tokens.get(key, 0) + row.tokens
    return max(tokens.values(), default=0)


def _assign_rollouts(table: Sequence[TraceRow], rollouts: list[list[int]], n: int) -> list[list[int]]:
    """Rounds of n rollouts, largest first; in each round the largest goes to the lightest mini-batch."""
    n = min(n, len(rollouts))
    weight = {rows[0]: sum(table[row].tokens for row in rows) for rows in rollouts}
    ordered = sorted(rollouts, key=lambda rows: (-weight[rows[0]], rows[0]))
    groups: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for start in range(0, len(ordered), max(n, 1)):
        lightest = sorted(range(n), key=lambda group: (loads[group], group))
        for group, rows in zip(lightest, ordered[start : start + n], strict=False):
            groups[group] += rows
            loads[group] += weight[rows[0]]
    return [sorted(group) for group in groups]


def _part(table: Sequence[TraceRow], rows: list[int], partitions: int, ranks: int, budget: int) -> MiniBatchPlan:
    own = [[row for row in rows if table[row].rank // partitions == rank] for rank in range(ranks)]
    packed = [_first_fit(table, each, budget) for each in own]
    most = max(map(len, packed))
    return MiniBatchPlan(tuple(rows), tuple((*bins, *[()] * (most - len(bins))) for bins in packed))


def _first_fit(table: Sequence[TraceRow], rows: Iterable[int], budget: int) -> tuple[tuple[int, ...], ...]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda number: (-table[number].tokens, number)):
        tokens = table[row].tokens
        fitting = next((index for index, left in enumerate(room) if left >= tokens), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(budget)
        bins[fitting].append(row)
        room[fitting] -= tokens
    return tuple(map(tuple, bins))
