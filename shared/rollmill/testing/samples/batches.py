"""Batches made by hand: traces in, records of the topic ``batches`` out, as a batcher would write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from rollmill.models import BatchHeader, Denominators, GroupRow, PolicyVersion, TokenRange, TraceRow

CONTEXT = (-1, -1)

Steps = Sequence[Sequence[Sequence["SampleTrace"]]]
"""Traces by rank and micro-batch. A micro-batch without traces is a filler."""


@dataclass(frozen=True)
class SampleTrace:
    """A prompt and one reply, all of the reply trained."""

    session_id: str
    prompt: tuple[int, ...] = (1, 2)
    reply: tuple[int, ...] = (3, 4, 5)
    log_probs: tuple[float, ...] = (-0.5, -0.25, -0.125)
    version: PolicyVersion = PolicyVersion(0, 0)  # noqa: RUF009  # an immutable pair
    advantage: float = 1.0
    reward: float = 1.0
    weight: float = 1.0
    group_id: str = "group"

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.reply)

    @property
    def units(self) -> tuple[TokenRange, ...]:
        return (TokenRange(f"call-{self.session_id}", 0, 0, len(self.reply), self.version),)


def step_values(step: int, ranks: Steps, **header: Any) -> list[list[bytes]]:
    """Values of the step's records by rank, in order. ``header``: fields that differ from the defaults."""
    table = tuple(_rows(ranks))
    shared: dict[str, Any] = {
        "run": "run",
        "policy": "policy",
        "batch_id": f"batch-{step}",
        "step": step,
        "world_size": len(ranks),
        "policy_version": PolicyVersion(),
        "denominators": _denominators(table),
        "table": table,
        "groups": _groups(ranks),
        **header,
    }
    return [
        [_value(traces, rank, number, len(batches), table, shared) for number, traces in enumerate(batches)]
        for rank, batches in enumerate(ranks)
    ]


def _rows(ranks: Steps) -> Iterator[TraceRow]:
    for rank, batches in enumerate(ranks):
        for number, traces in enumerate(batches):
            for trace in traces:
                yield TraceRow(
                    session_id=trace.session_id,
                    group_id=trace.group_id,
                    rank=rank,
                    micro_batch=number,
                    tokens=trace.tokens,
                    mask_sum=len(trace.reply),
                    oldest=trace.version,
                    loss_weight=trace.weight,
                    units=trace.units,
                )


def _groups(ranks: Steps) -> tuple[GroupRow, ...]:
    """In the order of their ids; all rollouts of a group are in its statistics."""
    rewards: dict[str, dict[str, float]] = {}
    for trace in (trace for batches in ranks for traces in batches for trace in traces):
        rewards.setdefault(trace.group_id, {})[trace.session_id] = trace.reward
    return tuple(_group(name, tuple(values.values())) for name, values in sorted(rewards.items()))


def _group(name: str, rewards: tuple[float, ...]) -> GroupRow:
    mean, deviation = float(np.mean(rewards)), float(np.std(rewards))
    return GroupRow(group_id=name, size=len(rewards), rewards=rewards, mean=mean, deviation=deviation)


def _denominators(table: Sequence[TraceRow]) -> Denominators:
    return Denominators(
        tokens=sum(row.mask_sum for row in table),
        weighted_tokens=sum(row.mask_sum * row.loss_weight for row in table),
        rollouts=len({row.session_id for row in table}),
        groups=len({row.group_id for row in table}),
    )


def _value(
    traces: Sequence[SampleTrace], rank: int, number: int, count: int, table: Sequence[TraceRow], shared: dict[str, Any]
) -> bytes:
    header = BatchHeader(rank=rank, micro_batch=number, micro_batches=count, filler=not traces, **shared)
    rows = [index for index, row in enumerate(table) if (row.rank, row.micro_batch) == (rank, number)]
    tensors = _tensors(traces, rows) if traces else _filler()
    return save({**tensors, **_indices(rows, table)}, {"header": header.model_dump_json()})


def _indices(rows: Sequence[int], table: Sequence[TraceRow]) -> dict[str, npt.NDArray[Any]]:
    """Indices of the group and of the rollout of each trace; -1 in a filler, which has no rows."""
    groups = sorted({row.group_id for row in table})
    rollouts = list(dict.fromkeys(row.session_id for row in table))
    return {
        "group_index": _array([groups.index(table[row].group_id) for row in rows] or [-1], np.int32),
        "session_index": _array([rollouts.index(table[row].session_id) for row in rows] or [-1], np.int32),
    }


def _tensors(traces: Sequence[SampleTrace], rows: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    parts = [(trace, len(trace.prompt), len(trace.reply)) for trace in traces]
    runs = [
        (run, length) for trace, prompt, reply in parts for run, length in ((CONTEXT, prompt), (trace.version, reply))
    ]
    return {
        "input_ids": _array([token for trace in traces for token in trace.prompt + trace.reply], np.int32),
        "loss_mask": _array([bit for _, prompt, reply in parts for bit in [0] * prompt + [1] * reply], np.uint8),
        "behavior_log_probs": _array(
            [value for trace, prompt, _ in parts for value in (0.0,) * prompt + trace.log_probs], np.float32
        ),
        "versions": _array([(*run, length) for run, length in runs], np.int32),
        "turn_ids": _array([(-1 if run == CONTEXT else 0, length) for run, length in runs], np.int32),
        "cu_seqlens": _array([0, *itertools.accumulate(trace.tokens for trace in traces)], np.int32),
        "prompt_lengths": _array([prompt for _, prompt, _ in parts], np.int32),
        "trace_index": _array(rows, np.int32),
        "advantages": _array([trace.advantage for trace in traces], np.float32),
        "rewards": _array([trace.reward for trace in traces], np.float32),
        "later_rewards": _array([trace.reward for trace in traces], np.float32),
        "loss_weights": _array([trace.weight for trace in traces], np.float32),
        "temperatures": _array([1.0 for _ in runs], np.float32),
    }


def _filler() -> dict[str, npt.NDArray[Any]]:
    """Two tokens of context that belong to no trace of the table."""
    idle = SampleTrace("filler", prompt=(1, 2), reply=(), log_probs=(), weight=0.0, advantage=0.0)
    tensors = _tensors([idle], [-1])
    kept = {
        name: tensors[name][:1] for name in ("versions", "turn_ids", "temperatures")
    }  # a run of no tokens is no run
    return {**tensors, **kept}


def _array(values: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.array(values, dtype=dtype)
