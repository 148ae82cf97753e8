"""From the message of a step to tensors: 256 long-tailed traces of at most 32,768 tokens, padded and packed.

Ours starts at the bytes as they are in the log, header and checks included. The contenders start at what costs them
least: Python lists for the per-row filling, finished tensors per trace for `pad_sequence`, finished arrays for the
memcpy. All make the same values per token. They take turns, so that what else runs on the machine meets all alike, and
figures are of the fastest round of each. Our padding of zeros is memory that was never touched, and the memcpy
writes it; in the packed layout, which has no padding, both write the same.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from benchmarks import batcher_contenders as contenders
from benchmarks.batcher_message import BUDGET, Traces, message, traces
from benchmarks.queue_contender import transfer_queue
from rollmill.trainer.layouts.arrays import PackedArrays, pack, pad
from rollmill.trainer.layouts.micro_batch import tensors_of
from rollmill.trainer.layouts.safetensors_reader import read_batch
from rollmill_batcher.groups.config import Size
from rollmill_batcher.steps.packing import plan_layout

ROUNDS = 7
RANKS = (1, 2, 8)

Call = Callable[[], Any]


def measure() -> dict[str, Any]:
    """Tokens per second by layout and contender, and quotients of times: above 1 ours is the faster one."""
    made = traces()
    value = message(made)
    figures = {name: _figures(made, calls) for name, calls in _layouts(made, value).items()}
    return {
        "traces": len(made.traces),
        "tokens": made.tokens,
        "longest": max(made.lengths),
        "vs_per_row": min(layout["vs_per_row"] for layout in figures.values()),
        "vs_pad_sequence": figures["padded"]["vs_pad_sequence"],
        **_against_transfer_queue(made),
        "vs_memcpy": min(layout["vs_memcpy"] for layout in figures.values()),
        "packing_efficiency": _packing(made),
        "message_to_tensor_without_copy": _shares_memory(value),
        **figures,
    }


def packed(value: bytes) -> PackedArrays:
    batch = read_batch(value)
    return pack(batch, np.ones(len(batch.trace_index), dtype=np.bool_))


def _layouts(made: Traces, value: bytes) -> dict[str, dict[str, Call]]:
    lists, parts = contenders.lists_of(made), contenders.tensors_of_traces(made)
    copied = {name: partial(contenders.memcpy, _arrays(layout)) for name, layout in _finished(value).items()}
    return {
        "padded": {
            "ours": lambda: tensors_of(pad(packed(value))),
            "per_row": lambda: contenders.padded_per_row(lists),
            "pad_sequence": lambda: contenders.padded_by_pad_sequence(parts),
            "memcpy": copied["padded"],
        },
        "packed": {
            "ours": lambda: tensors_of(packed(value)),
            "per_row": lambda: contenders.packed_per_row(lists),
            "cat": lambda: contenders.packed_by_cat(parts),
            "memcpy": copied["packed"],
        },
    }


def _finished(value: bytes) -> dict[str, Any]:
    arrays = packed(value)
    return {"packed": arrays, "padded": pad(arrays)}


def _arrays(layout: Any) -> dict[str, Any]:
    """Arrays of one value per token."""
    values = {each.name: getattr(layout, each.name) for each in fields(layout)}
    return {name: values[name] for name in contenders.DTYPES if name in values}


def _against_transfer_queue(made: Traces) -> dict[str, Any]:
    """Its put and get of the wire's columns beside ours without a broker: traces to a message, message to tensors."""
    found = transfer_queue(made.lengths)
    calls: dict[str, Call] = {"ours": lambda: tensors_of(packed(message(made)))}
    ours = min(_timed(calls)["ours"])
    quotient = found["seconds"] and round(found["seconds"] / ours, 2)
    return {"vs_transfer_queue": quotient, "transfer_queue": {**found, "ours_seconds": round(ours, 4)}}


def _figures(made: Traces, calls: dict[str, Call]) -> dict[str, Any]:
    times = _timed(calls)
    seconds = {name: min(spent) for name, spent in times.items()}
    rates = {f"{name}_tokens_per_second": round(made.tokens / spent) for name, spent in seconds.items()}
    against = {f"vs_{name}": round(spent / seconds["ours"], 2) for name, spent in seconds.items() if name != "ours"}
    fastest = {name: round(spent * 1e3, 2) for name, spent in seconds.items()}
    median = {name: round(statistics.median(spent) * 1e3, 2) for name, spent in times.items()}
    return {**rates, **against, "milliseconds": fastest, "milliseconds_median": median}


def _timed(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Without the garbage collector, which would charge the contenders' lists to whoever runs next."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter()
            made = call()
            times[name].append(time.perf_counter() - began)
            del made
    gc.enable()
    return times


def _packing(made: Traces) -> dict[str, float]:
    """How full micro-batches of 32,768 tokens are after rounding to equal counts, by number of ranks."""
    sizes = [Size(length, 9 * length) for length in made.lengths]
    budget = Size(BUDGET, 9 * BUDGET)
    counts = {ranks: sum(map(len, plan_layout(sizes, budget, ranks, seed=0))) for ranks in RANKS}
    return {f"{ranks}_ranks": round(made.tokens / (count * BUDGET), 4) for ranks, count in counts.items()}


def _shares_memory(value: bytes) -> bool:
    """Whether the tensor of log-probs points into the message's own bytes."""
    start = np.frombuffer(value, np.uint8).ctypes.data
    pointer = tensors_of(packed(value))["behavior_log_probs"].data_ptr()
    return bool(start <= pointer < start + len(value))
