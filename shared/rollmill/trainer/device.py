"""Micro-batches on a device, copied while the one before is computed on. Needs torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import torch

from rollmill.trainer.layouts.micro_batch import MicroBatch, PaddedMicroBatch

Batch = TypeVar("Batch", MicroBatch, PaddedMicroBatch)
StartedCopy: TypeAlias = "Callable[[], Batch]"
"""A copy that has been started; called, it returns the batch for use on the current stream."""
Begun: TypeAlias = "Callable[[], Batch]"
"""The name of `StartedCopy` in version 0.1.0."""


def on_device(batches: Iterable[Batch], device: torch.device | str, ahead: int = 1) -> Iterator[Batch]:
    """The batches on ``device``, in order.

    On CUDA each is copied from pinned memory on a separate stream, ``ahead`` batches before it is yielded, so
    that the copy overlaps the computation; the current stream waits for it, the host does not. Elsewhere a batch is
    moved when it is yielded.
    """
    target = torch.device(device)
    if target.type != "cuda":
        return (batch.to(target) for batch in batches)
    return overlapped(batches, _side_stream(target), ahead)


def overlapped(batches: Iterable[Batch], begin: Callable[[Batch], StartedCopy[Batch]], ahead: int) -> Iterator[Batch]:
    """Start copies of ``ahead`` batches more than were yielded; no batch is requested earlier than that."""
    waiting: deque[StartedCopy[Batch]] = deque()
    for batch in batches:
        waiting.append(begin(batch))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _side_stream(target: torch.device) -> Callable[[Batch], StartedCopy[Batch]]:
    side = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]  # torch annotates no constructor

    def begin(batch: Batch) -> StartedCopy[Batch]:
        with torch.cuda.stream(side):
            moved = batch.pin_memory().to(target, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
            copied.record(side)

        def finish() -> Batch:
            current = torch.cuda.current_stream(target)
            current.wait_event(copied)
            # Else the allocator reuses the memory while the current stream still reads it.
            for tensor in moved.tensors():
                tensor.record_stream(current)
            return moved

        return finish

    return begin
