"""How fast packed batches reach a CUDA device: `python benchmarks/gpu_feed.py FILE [--json]`, without Kafka.

FILE comes from ``record_batches.py``. Its messages are read, widened and copied to the device, each copy overlapped
with a computation on the batch before; beside it the same bytes are copied from pinned memory and nothing else. The
last line of ``--json`` is null where there is no CUDA.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rollmill.models import PolicyVersion
from rollmill.testing.samples.recorded_messages import read_messages
from rollmill.trainer import MicroBatch, Step
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.device import on_device
from rollmill.trainer.layouts.safetensors_reader import read_batch

GIGA = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ahead", type=int, default=2, help="copies begun before the batch is handed over")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    options = parser.parse_args()
    messages = list(read_messages(options.file))
    if torch.cuda.is_available():
        result = measure(messages, torch.device("cuda"), options.rounds, options.ahead)
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    else:
        result = None
        seen = feed(messages, torch.device("cpu"), options.ahead)
        print(f"no CUDA here: {seen / GIGA:.2f} GB of tensors were handed over on the CPU, nothing is measured")
    if options.json:
        print(json.dumps(result))


def step_of(messages: Sequence[bytes]) -> Step:
    records = StepRecords(tuple(map(read_batch, messages)), {0: len(messages)})
    return Step(records, filter_step(records.header, PolicyVersion(), {}), lambda _: None)


def feed(messages: Sequence[bytes], device: torch.device, ahead: int) -> int:
    """From messages to tensors that were computed with; their bytes."""
    handed = 0
    for batch in on_device(step_of(messages), device, ahead):
        compute(batch)
        handed += batch.nbytes
    return handed


def compute(batch: MicroBatch) -> torch.Tensor:
    """Reads every value, as a forward pass would."""
    return torch.stack([tensor.sum(dtype=torch.float64) for tensor in batch.tensors()]).sum()


def measure(messages: Sequence[bytes], device: torch.device, rounds: int, ahead: int) -> dict[str, Any]:
    handed = feed(messages, device, ahead)  # warms pinned memory and kernels
    fed = min(_seconds(lambda: feed(messages, device, ahead), rounds))
    prepared = list(step_of(messages))
    ready = min(_seconds(lambda: [compute(batch) for batch in on_device(prepared, device, ahead)], rounds))
    plain = min(_seconds(_plain_copy(prepared, device), rounds))
    return {
        "device": torch.cuda.get_device_name(device),
        "gigabytes": round(handed / GIGA, 3),
        "messages": len(messages),
        "gb_per_s_from_messages": round(handed / fed / GIGA, 2),
        "gb_per_s_from_tensors": round(handed / ready / GIGA, 2),
        "gb_per_s_pinned_copy": round(handed / plain / GIGA, 2),
        "vs_pinned_copy": round(plain / fed, 3),
    }


def _plain_copy(batches: Sequence[MicroBatch], device: torch.device) -> Any:
    """One pinned block of the same size, copied as one."""
    size = sum(batch.nbytes for batch in batches)
    source = torch.empty(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=True)


def _seconds(work: Any, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        yield time.perf_counter() - began


if __name__ == "__main__":
    main()
