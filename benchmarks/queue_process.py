"""Put and get of 256 traces through TransferQueue. Needs it, torch and Ray; run by `benchmarks.queue_contender`.

Reads the lengths as JSON from standard input, writes the seconds of each round as JSON. It imports nothing of
Rollmill, which its environment need not have.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray  # type: ignore[import-not-found]  # of the benchmark's own environment, as are those below
import torch
import transfer_queue  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]

ROUNDS = 5


def main() -> None:
    lengths: list[int] = json.load(sys.stdin)
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", object_store_memory=2**28)
    transfer_queue.init()
    fields = _fields(lengths)
    seconds = [_round(number, fields) for number in range(ROUNDS)]
    transfer_queue.close()
    ray.shutdown()
    print(json.dumps(seconds))


def _fields(lengths: list[int]) -> TensorDict:
    """The columns of our wire, one jagged tensor each."""
    columns: dict[str, Any] = {
        "input_ids": [torch.randint(0, 150_000, (n,), dtype=torch.int32) for n in lengths],
        "loss_mask": [torch.ones(n, dtype=torch.uint8) for n in lengths],
        "behavior_log_probs": [torch.rand(n) for n in lengths],
    }
    jagged = {name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in columns.items()}
    scalars = {"advantages": torch.rand(len(lengths)), "rewards": torch.rand(len(lengths))}
    return TensorDict({**jagged, **scalars}, batch_size=len(lengths))


def _round(number: int, fields: TensorDict) -> float:
    """One put and one get of everything, under keys of its own."""
    keys = [f"{number}-{index}" for index in range(fields.batch_size[0])]
    began = time.perf_counter()
    transfer_queue.kv_batch_put(keys=keys, partition_id="bench", fields=fields)
    got = transfer_queue.kv_batch_get(keys=keys, partition_id="bench")
    spent = time.perf_counter() - began
    assert int(got["input_ids"].values().numel()) == int(fields["input_ids"].values().numel())  # noqa: S101  # all is there
    transfer_queue.kv_clear(keys=keys, partition_id="bench")
    return spent


main()
