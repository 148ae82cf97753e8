"""What `benchmarks.batcher` compares with: the same values per token, built the ways that are common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.batcher_message import Traces
from rollmill.models import Trace, expand

DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.bool,
    "behavior_log_probs": torch.float32,
    "advantages": torch.float32,
    "loss_weight": torch.float32,
    "versions": torch.int32,
    "temperatures": torch.float32,
    "turn_ids": torch.int32,
    "returns": torch.float32,
}
"""Values per token, and what a trainer computes with."""
FILL = {"versions": -1, "turn_ids": -1}
PADDED_ONLY = frozenset({"attention_mask"})

Rows = Sequence[Mapping[str, Any]]


def lists_of(made: Traces) -> list[dict[str, Any]]:
    """Python lists, as records parsed from JSON or written as dataclasses hold them."""
    return [{name: values.tolist() for name, values in row.items()} for row in map(_values, range(256), made.traces)]


def tensors_of_traces(made: Traces) -> list[dict[str, torch.Tensor]]:
    """A tensor per trace and value, widened beforehand."""
    rows = map(_values, range(len(made.traces)), made.traces)
    return [{name: torch.from_numpy(values).to(DTYPES[name]) for name, values in row.items()} for row in rows]


def _values(index: int, trace: Trace) -> dict[str, np.ndarray[Any, Any]]:
    prompt, response = len(trace.prompt_ids), len(trace.response_ids)
    length = prompt + response
    mask = np.concatenate([np.zeros(prompt, np.uint8), trace.loss_mask])
    assert trace.response_logprobs is not None  # noqa: S101  # the benchmark's own traces have them
    return {
        "input_ids": np.concatenate([trace.prompt_ids, trace.response_ids]),
        "attention_mask": np.ones(length, np.int64),
        "position_ids": np.arange(length),
        "loss_mask": mask.astype(bool),
        "behavior_log_probs": np.concatenate([np.zeros(prompt, np.float32), trace.response_logprobs]),
        "advantages": np.full(length, index % 2 - 0.5, np.float32),
        "loss_weight": mask.astype(np.float32),
        "versions": np.concatenate([np.full((prompt, 2), -1, np.int32), expand(trace.versions)]),
        "temperatures": np.ones(length, np.float32),
        "turn_ids": np.concatenate([np.full(prompt, -1, np.int32), np.zeros(response, np.int32)]),
        "returns": np.full(length, trace.reward, np.float32),
    }


def padded_per_row(rows: Rows) -> dict[str, torch.Tensor]:
    """A plain `to_tensors`: a full tensor per value, each row of it filled from ``torch.tensor`` of a list."""
    width = max(len(row["input_ids"]) for row in rows)
    padded = {}
    for name, dtype in DTYPES.items():
        shape = (len(rows), width, 2) if name == "versions" else (len(rows), width)
        padded[name] = torch.full(shape, FILL.get(name, 0), dtype=dtype)
        for number, row in enumerate(rows):
            padded[name][number, : len(row[name])] = torch.tensor(row[name], dtype=dtype)
    return padded


def packed_per_row(rows: Rows) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([torch.tensor(row[name], dtype=dtype) for row in rows])
        for name, dtype in DTYPES.items()
        if name not in PADDED_ONLY
    }


def padded_by_pad_sequence(rows: Rows) -> dict[str, torch.Tensor]:
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=FILL.get(name, 0))
        for name in DTYPES
    }


def packed_by_cat(rows: Rows) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in DTYPES if name not in PADDED_ONLY}


def memcpy(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The same bytes into fresh memory: the least that any copy costs."""
    return {name: array.copy() for name, array in arrays.items()}
