"""A step's groups to the bytes of its micro-batches: advantages, weights, packing, headers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.models import BatchHeader, Cut, Trace
from rollmill.models.extras import Form, form_of
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.groups.staleness import PolicyClock, Staleness, age_split
from rollmill_batcher.steps.credit import Advantages, advantages
from rollmill_batcher.steps.loss_weights import denominators, loss_weights
from rollmill_batcher.steps.packing import Bin, plan
from rollmill_batcher.steps.step_table import TrainedTrace, group_row, table_of
from rollmill_batcher.steps.tensors import PackedTrace, dump, extra_forms, filler, pack


@dataclass(frozen=True)
class MicroBatch:
    """One record of the topic ``batches``."""

    rank: int
    number: int
    payload: bytes
    tokens: int
    filler: bool
    content: str
    """Digest of what the step trains, the same for each of its records and for any number of ranks."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens of the whole step by staleness."""


def micro_batches(
    step: Sequence[EvaluatedGroup], cut: Cut, clock: PolicyClock, rules: BatcherConfig
) -> tuple[MicroBatch, ...]:
    """The records of a step, the same number for every rank. ``cut`` has its batch id; ``step`` trains something."""
    traces = _trained(step, advantages(step, rules.learning), rules.staleness)
    shares = [trace.share for trace in traces]
    plain = loss_weights(rules.learning.weighting, shares, rules.learning.constant)
    weights = [weight * trace.decay for weight, trace in zip(plain, traces, strict=True)]
    places = plan([trace.size for trace in traces], rules.micro_batch, rules.world_size, cut.seed)
    real = sum(bool(members) for share in places for members in share)
    forms = extra_forms([trace.trace for trace in traces])
    header = BatchHeader(
        **_of_cut(cut, clock, rules),
        micro_batches=len(places[0]),
        denominators=denominators(rules.learning.weighting, shares, weights),
        **_ages(clock, [trace.trace for trace in traces]),
        packing_efficiency=sum(trace.tokens for trace in traces) / (real * rules.micro_batch.tokens),
        **_extras([trace.trace for trace in traces], forms),
        fingerprints=_fingerprints([trace.trace for trace in traces]),
        table=table_of(traces, weights, places),
        groups=tuple(group_row(group, rules.scoring) for group in step),
    )
    lines = [
        PackedTrace(t.trace, row, t.advantage, weights[row], t.group, t.session, t.later)
        for row, t in enumerate(traces)
    ]
    return tuple(_records(header, lines, places, _content(traces, weights), forms))


def _content(traces: Sequence[TrainedTrace], weights: Sequence[float]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for trace, weight in zip(traces, weights, strict=True):
        member = trace.member.member
        name = (member.session_id, member.attempt, trace.verdict.index)
        digest.update(repr((*name, trace.trace.trained_tokens, weight, trace.advantage)).encode())
    return digest.hexdigest()


def _extras(traces: Sequence[Trace], forms: Mapping[str, Form]) -> dict[str, dict[str, Any]]:
    said = {name: f"{dtype} [{', '.join(map(str, ('T', *shape)))}]" for name, (dtype, shape) in forms.items()}
    others = Counter(name for t in traces for name, values in t.extras.items() if form_of(values) != forms[name])
    return {"extras": said, "extras_left_out": dict(sorted(others.items()))}


def _fingerprints(traces: Sequence[Trace]) -> dict[str, int]:
    counts = Counter(trace.fingerprint for trace in traces)
    return {name: counts[name] for name in sorted(filter(None, counts))}


def _ages(clock: PolicyClock, traces: Sequence[Trace]) -> dict[str, Any]:
    split = age_split(clock, traces)
    return {
        "staleness_histogram": clock.histogram(traces),
        "generation_ages": split.generation,
        "queue_ages": split.queue,
    }


def _of_cut(cut: Cut, clock: PolicyClock, rules: BatcherConfig) -> dict[str, Any]:
    """Header fields that the cut and the rules decide; rank and micro-batch are filled in for each record."""
    return {
        "run": rules.run,
        "policy": rules.policy,
        "batch_id": cut.batch_id,
        "step": cut.step,
        "rank": 0,
        "world_size": rules.world_size,
        "placement": rules.placement,
        "micro_batch": 0,
        "policy_version": cut.policy_version,
        "forks": dict(clock.forks),
        "max_staleness": rules.staleness.enforced,
        "staleness_basis": rules.staleness.basis,
        "staleness_action": rules.staleness.action.value,
        "queued_steps": cut.queued_steps,
        "advantage": rules.learning.name,
        "credit": rules.learning.credit.value,
        "loss_weighting": rules.learning.weighting.value,
    }


def _trained(step: Sequence[EvaluatedGroup], by_trace: Advantages, staleness: Staleness) -> list[TrainedTrace]:
    """Traces in the order of groups, sessions and traces; rollouts are numbered in the same order."""
    rollouts = [(place, member) for place, group in enumerate(step) for member in group.members if member.trained]
    return [
        TrainedTrace(
            member,
            trace,
            place,
            session,
            by_trace[member.member.session_id, member.member.attempt, trace.index],
            staleness.weight(trace.age),
        )
        for session, (place, member) in enumerate(rollouts)
        for trace in member.trained
    ]


def _records(
    header: BatchHeader,
    lines: Sequence[PackedTrace],
    places: Sequence[Sequence[Bin]],
    content: str,
    forms: Mapping[str, Form],
) -> Iterator[MicroBatch]:
    shortest = min(lines, key=lambda line: len(line.trace.prompt_ids) + len(line.trace.response_ids))
    for rank, share in enumerate(places):
        for number, members in enumerate(share):
            own = [lines[index] for index in members] or [filler(shortest.trace)]
            named = header.model_copy(update={"rank": rank, "micro_batch": number, "filler": not members})
            tensors = pack(own, forms)
            tokens = sum(row.tokens for row in header.table if (row.rank, row.micro_batch) == (rank, number))
            payload = dump(named, tensors)
            yield MicroBatch(rank, number, payload, tokens, not members, content, header.staleness_histogram)
