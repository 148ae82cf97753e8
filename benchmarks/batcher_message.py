"""The step that `benchmarks.batcher` measures: long-tailed traces, and the message that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollmill.models import BatchHeader, Denominators, GroupRow, PolicyVersion, Trace, TraceRow, TraceTurn, VersionRun
from rollmill_batcher.steps.tensors import PackedTrace, encode_batch, pack_tensors

TRACES, LONGEST, BUDGET = 256, 32768, 32768
GROUP = 8


@dataclass(frozen=True)
class Traces:
    """Traces of one reply each; the first quarter of each trace is its prompt."""

    traces: tuple[Trace, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(trace.prompt_ids) + len(trace.response_ids) for trace in self.traces]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def traces(seed: int = 0) -> Traces:
    """Lognormal lengths, median 3,000 tokens; the longest has ``LONGEST``."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(8.0, 1.1, TRACES), 64, LONGEST).astype(int)
    lengths[0] = LONGEST
    return Traces(tuple(_trace(index, length, draw) for index, length in enumerate(lengths.tolist())))


def _trace(index: int, length: int, draw: np.random.Generator) -> Trace:
    prompt = length // 4
    response = length - prompt
    return Trace(
        prompt_ids=draw.integers(0, 150_000, prompt, dtype=np.int32),
        response_ids=draw.integers(0, 150_000, response, dtype=np.int32),
        loss_mask=np.ones(response, np.uint8),
        response_logprobs=-draw.exponential(1.0, response).astype(np.float32),
        versions=(VersionRun(PolicyVersion(0, index % 3), response),),
        turns=(TraceTurn(completion_id=f"call-{index}", start=0, stop=response, temperature=1.0),),
        reward=float(index % 2),
    )


def message(made: Traces) -> bytes:
    """All traces in one record; larger than what Kafka takes, so that a padded batch has all of them."""
    packed = [
        PackedTrace(trace, index, advantage=index % 2 - 0.5, weight=1.0, group=index // GROUP, session=index)
        for index, trace in enumerate(made.traces)
    ]
    return encode_batch(_header(made), pack_tensors(packed))


def _header(made: Traces) -> BatchHeader:
    rewards = tuple(float(index % 2) for index in range(GROUP))
    groups = TRACES // GROUP
    trained = sum(trace.trained_tokens for trace in made.traces)
    return BatchHeader(
        run="run",
        policy="policy",
        batch_id="batch",
        step=0,
        rank=0,
        world_size=1,
        micro_batch=0,
        micro_batches=1,
        policy_version=PolicyVersion(0, 2),
        denominators=Denominators(tokens=trained, weighted_tokens=trained, rollouts=TRACES, groups=groups),
        table=tuple(_row(index, trace) for index, trace in enumerate(made.traces)),
        groups=tuple(
            GroupRow(group_id=f"g{n}", size=GROUP, rewards=rewards, mean=0.5, deviation=0.5) for n in range(groups)
        ),
    )


def _row(index: int, trace: Trace) -> TraceRow:
    return TraceRow(
        session_id=f"s{index}",
        group_id=f"g{index // GROUP}",
        rank=0,
        micro_batch=0,
        tokens=len(trace.prompt_ids) + len(trace.response_ids),
        mask_sum=trace.trained_tokens,
        oldest=PolicyVersion(0, index % 3),
        loss_weight=1.0,
        units=trace.units(),
    )
