"""From a step's groups to the bytes of its micro-batches: advantages, weights, packing, headers."""

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
from rollmill_batcher.steps.credit import Advantages, trace_advantages
from rollmill_batcher.steps.loss_weights import denominators, loss_weights
from rollmill_batcher.steps.packing import Layout, plan_layout
from rollmill_batcher.steps.step_table import TrainedTrace, build_table, group_row
from rollmill_batcher.steps.tensors import PackedTrace, encode_batch, extra_forms, filler, pack_tensors


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


def build_micro_batches(
    step: Sequence[EvaluatedGroup], cut: Cut, clock: PolicyClock, config: BatcherConfig
) -> tuple[MicroBatch, ...]:
    """The records of a step, the same number for every rank. ``cut`` has its batch id; ``step`` trains something."""
    traces = _trained(step, trace_advantages(step, config.learning), config.staleness)
    trained = [trace.trained_tokens for trace in traces]
    unscaled = loss_weights(config.learning.weighting, trained, config.learning.constant)
    weights = [weight * trace.decay for weight, trace in zip(unscaled, traces, strict=True)]
    layout = plan_layout([trace.size for trace in traces], config.micro_batch, config.world_size, cut.seed)
    filled = sum(bool(members) for own in layout for members in own)
    forms = extra_forms([trace.trace for trace in traces])
    header = BatchHeader(
        **_header_fields(cut, clock, config),
        micro_batches=len(layout[0]),
        denominators=denominators(config.learning.weighting, trained, weights),
        **_age_fields(clock, [trace.trace for trace in traces]),
        packing_efficiency=sum(trace.tokens for trace in traces) / (filled * config.micro_batch.tokens),
        **_extra_fields([trace.trace for trace in traces], forms),
        fingerprints=_fingerprints([trace.trace for trace in traces]),
        table=build_table(traces, weights, layout),
        groups=tuple(group_row(group, config.scoring) for group in step),
    )
    packed = [
        PackedTrace(t.trace, row, t.advantage, weights[row], t.group, t.session, t.later_reward)
        for row, t in enumerate(traces)
    ]
    return tuple(_records(header, packed, layout, _content(traces, weights), forms))


def _content(traces: Sequence[TrainedTrace], weights: Sequence[float]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for trace, weight in zip(traces, weights, strict=True):
        member = trace.member.member
        name = (member.session_id, member.attempt, trace.verdict.index)
        digest.update(repr((*name, trace.trace.trained_tokens, weight, trace.advantage)).encode())
    return digest.hexdigest()


def _extra_fields(traces: Sequence[Trace], forms: Mapping[str, Form]) -> dict[str, dict[str, Any]]:
    described = {name: f"{dtype} [{', '.join(map(str, ('T', *shape)))}]" for name, (dtype, shape) in forms.items()}
    others = Counter(name for t in traces for name, values in t.extras.items() if form_of(values) != forms[name])
    return {"extras": described, "extras_left_out": dict(sorted(others.items()))}


def _fingerprints(traces: Sequence[Trace]) -> dict[str, int]:
    counts = Counter(trace.fingerprint for trace in traces)
    return {name: counts[name] for name in sorted(filter(None, counts))}


def _age_fields(clock: PolicyClock, traces: Sequence[Trace]) -> dict[str, Any]:
    split = age_split(clock, traces)
    return {
        "staleness_histogram": clock.histogram(traces),
        "generation_ages": split.generation,
        "queue_ages": split.queue,
    }


def _header_fields(cut: Cut, clock: PolicyClock, config: BatcherConfig) -> dict[str, Any]:
    """Header fields that the cut and the settings plan_cut; rank and micro-batch are filled in for each record."""
    return {
        "run": config.run,
        "policy": config.policy,
        "batch_id": cut.batch_id,
        "step": cut.step,
        "rank": 0,
        "world_size": config.world_size,
        "placement": config.placement,
        "micro_batch": 0,
        "policy_version": cut.policy_version,
        "forks": dict(clock.forks),
        "max_staleness": config.staleness.enforced,
        "staleness_basis": config.staleness.basis,
        "staleness_action": config.staleness.action.value,
        "queued_steps": cut.queued_steps,
        "advantage": config.learning.name,
        "credit": config.learning.credit.value,
        "loss_weighting": config.learning.weighting.value,
    }


def _trained(step: Sequence[EvaluatedGroup], by_trace: Advantages, staleness: Staleness) -> list[TrainedTrace]:
    """Traces in the order of groups, sessions and traces; rollouts are numbered in the same order."""
    rollouts = [(number, member) for number, group in enumerate(step) for member in group.members if member.trained]
    return [
        TrainedTrace(
            member,
            trace,
            group,
            session,
            by_trace[member.member.session_id, member.member.attempt, trace.index],
            staleness.weight(trace.age),
        )
        for session, (group, member) in enumerate(rollouts)
        for trace in member.trained
    ]


def _records(
    header: BatchHeader,
    packed: Sequence[PackedTrace],
    layout: Layout,
    content: str,
    forms: Mapping[str, Form],
) -> Iterator[MicroBatch]:
    shortest = min(packed, key=lambda each: len(each.trace.prompt_ids) + len(each.trace.response_ids))
    for rank, bins in enumerate(layout):
        for number, members in enumerate(bins):
            own = [packed[index] for index in members] or [filler(shortest.trace)]
            numbered = header.model_copy(update={"rank": rank, "micro_batch": number, "filler": not members})
            tensors = pack_tensors(own, forms)
            tokens = sum(row.tokens for row in header.table if (row.rank, row.micro_batch) == (rank, number))
            payload = encode_batch(numbered, tensors)
            yield MicroBatch(rank, number, payload, tokens, not members, content, header.staleness_histogram)
