"""Micro-batches on a device, copied while the one before is computed on. Needs torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import torch

from rollmill.trainer.layouts.micro_batch import MicroBatch, PaddedMicroBatch

Batch = TypeVar("Batch", MicroBatch, PaddedMicroBatch)
Begun: TypeAlias = "Callable[[], Batch]"
"""A copy under way; called, it gives what work on the current stream may use."""


def on_device(batches: Iterable[Batch], device: torch.device | str, ahead: int = 1) -> Iterator[Batch]:
    """The batches on ``device``, in order.

    On CUDA each is copied from pinned memory on a stream of its own, ``ahead`` batches before it is handed over, so
    that the copy runs beside the computation; the current stream waits for it, the host does not. Elsewhere a batch is
    moved as it is handed over.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return (batch.to(place) for batch in batches)
    return overlapped(batches, _side_stream(place), ahead)


def overlapped(batches: Iterable[Batch], begin: Callable[[Batch], Begun[Batch]], ahead: int) -> Iterator[Batch]:
    """Begin ``ahead`` batches more than are handed over; no batch is asked for earlier than that."""
    waiting: deque[Begun[Batch]] = deque()
    for batch in batches:
        waiting.append(begin(batch))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _side_stream(place: torch.device) -> Callable[[Batch], Begun[Batch]]:
    side = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]  # torch annotates no constructor

    def begin(batch: Batch) -> Begun[Batch]:
        with torch.cuda.stream(side):
            moved = batch.pin_memory().to(place, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
            copied.record(side)

        def finish() -> Batch:
            current = torch.cuda.current_stream(place)
            current.wait_event(copied)
            # Else the allocator gives the memory away while the current stream still reads it.
            for tensor in moved.tensors():
                tensor.record_stream(current)
            return moved

        return finish

    return begin
