"""A step's groups to the bytes of its micro-batches: advantages, weights, packing, headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.errors import ConfigurationError
from rollmill.models import BatchHeader, Cut
from rollmill_batcher.packing import Bin, plan
from rollmill_batcher.rules import Learning, Rules
from rollmill_batcher.staleness import PolicyClock
from rollmill_batcher.standing import JudgedGroup
from rollmill_batcher.table import TrainedTrace, table_of
from rollmill_batcher.tensors import Line, dump, filler, pack
from rollmill_batcher.weights import denominators, loss_weights

Advantages = dict[tuple[str, int], float]
"""By (session, attempt)."""


@dataclass(frozen=True)
class MicroBatch:
    """One record of the topic ``batches``."""

    rank: int
    number: int
    payload: bytes
    tokens: int
    filler: bool


def micro_batches(step: Sequence[JudgedGroup], cut: Cut, clock: PolicyClock, rules: Rules) -> tuple[MicroBatch, ...]:
    """The records of a step, the same number for every rank. ``cut`` has its batch id; ``step`` trains something."""
    traces = _trained(step, advantages(step, rules.learning))
    shares = [trace.share for trace in traces]
    weights = loss_weights(rules.learning.weighting, shares, rules.learning.constant)
    places = plan([trace.size for trace in traces], rules.micro_batch, rules.world_size, cut.seed)
    real = sum(bool(members) for share in places for members in share)
    header = BatchHeader(
        **_of_cut(cut, clock, rules),
        micro_batches=len(places[0]),
        denominators=denominators(rules.learning.weighting, shares, weights),
        staleness_histogram=clock.histogram(trace.trace for trace in traces),
        packing_efficiency=sum(trace.tokens for trace in traces) / (real * rules.micro_batch.tokens),
        table=table_of(traces, weights, places),
    )
    lines = [Line(t.trace, row, t.advantage, weights[row]) for row, t in enumerate(traces)]
    return tuple(_records(header, lines, places))


def _of_cut(cut: Cut, clock: PolicyClock, rules: Rules) -> dict[str, Any]:
    """Header fields that the cut and the rules decide; rank and micro-batch are filled in for each record."""
    return {
        "run": rules.run,
        "policy": rules.policy,
        "batch_id": cut.batch_id,
        "step": cut.step,
        "rank": 0,
        "world_size": rules.world_size,
        "micro_batch": 0,
        "policy_version": cut.policy_version,
        "forks": dict(clock.forks),
        "max_staleness": rules.staleness.limit,
        "queued_steps": cut.queued_steps,
        "advantage": rules.learning.name,
        "loss_weighting": rules.learning.weighting.value,
    }


def advantages(step: Sequence[JudgedGroup], learning: Learning) -> Advantages:
    """Of every rollout that counts, whether it trains or not; a rollout counts once (RULES A1).

    Raises ConfigurationError where a strategy returns another number of values, or one that is not finite.
    """
    rewards = [np.array(group.rewards, dtype=np.float64) for group in step]
    by_group = [learning.advantage.compute(values) for values in rewards]
    every, counted = np.concatenate(rewards), [m.member for group in step for m in group.members if m.counts]
    values = learning.advantage.over_step(np.concatenate(by_group), every)
    if values.shape != every.shape or not np.isfinite(values).all():
        raise ConfigurationError(
            f"advantage strategy {learning.name!r} made {values.shape} values for {every.shape} rewards, "
            "or one that is not finite"
        )
    return {(m.session_id, m.attempt): float(value) for m, value in zip(counted, values, strict=True)}


def _trained(step: Sequence[JudgedGroup], by_rollout: Advantages) -> list[TrainedTrace]:
    """Traces in the order of groups, sessions and traces."""
    return [
        TrainedTrace(
            verdict.member, trace.index, trace.trace, by_rollout[verdict.member.session_id, verdict.member.attempt]
        )
        for group in step
        for verdict in group.members
        for trace in verdict.trained
    ]


def _records(header: BatchHeader, lines: Sequence[Line], places: Sequence[Sequence[Bin]]) -> Iterator[MicroBatch]:
    shortest = min(lines, key=lambda line: len(line.trace.prompt_ids) + len(line.trace.response_ids))
    for rank, share in enumerate(places):
        for number, members in enumerate(share):
            own = [lines[index] for index in members] or [filler(shortest.trace)]
            named = header.model_copy(update={"rank": rank, "micro_batch": number, "filler": not members})
            tensors = pack(own)
            tokens = sum(row.tokens for row in header.table if (row.rank, row.micro_batch) == (rank, number))
            yield MicroBatch(rank, number, dump(named, tensors), tokens, filler=not members)
