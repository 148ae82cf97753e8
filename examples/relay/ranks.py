"""The demo's data-parallel ranks: a stream for each, in one process, which has the model once.

Gradients of all ranks' micro-batches add up in the model's own buffers; the sum is what an all-reduce over processes
would give, because each rank divides by the step's denominator over all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from grpo_minimal import Layout as LayoutFunction
from grpo_minimal import LogProbs, packed
from relay.options import Layout
from rollmill.models import PolicyVersion
from rollmill.trainer import BatchStream, MicroBatch, PaddedMicroBatch, Step
from rollmill.trainer.batches.step_assembly import join_partitions


class RankStreams:
    """The steps of all ranks, each with the micro-batches of all. Raises AssertionError where ranks differ."""

    def __init__(self, streams: Sequence[BatchStream]) -> None:
        self._streams = streams
        self._held: dict[int, Step] = {}

    @classmethod
    @contextmanager
    def open(cls, stream: Callable[[int], BatchStream], ranks: int) -> Iterator[Self]:
        with ExitStack() as stack:
            yield cls([stack.enter_context(stream(rank)) for rank in range(ranks)])

    def steps(
        self, version: Callable[[], PolicyVersion], *, until: Callable[[], bool], timeout: float | None
    ) -> Iterator[Step]:
        """As `BatchStream.steps`. What some ranks have got is kept when another has none in time."""
        while self._fill(version, until, timeout):
            steps = [self._held[rank] for rank in range(len(self._streams))]
            self._held.clear()
            yield together(steps)

    def end_of_stream(self) -> None:
        self._streams[0].end_of_stream()

    def _fill(self, version: Callable[[], PolicyVersion], until: Callable[[], bool], timeout: float | None) -> bool:
        for rank, stream in enumerate(self._streams):
            if rank not in self._held:
                step = next(stream.steps(version, until=until, timeout=timeout), None)
                if step is None:
                    return False
                self._held[rank] = step
        return True


def together(steps: Sequence[Step]) -> Step:
    """One step of the same step on all ranks."""
    first = steps[0]
    if any((step.number, len(step), step.verdict) != (first.number, len(first), first.verdict) for step in steps):
        raise AssertionError(f"ranks differ: {[(step.number, len(step), step.verdict) for step in steps]}")

    def acknowledge(_: Step) -> None:
        for step in steps:
            step.ack()

    whole = Step(join_partitions([step.records for step in steps]), first.verdict, acknowledge)
    vars(whole)["arrays"] = tuple(chain.from_iterable(step.arrays for step in steps))
    return whole


def padded(micro_batch: MicroBatch, log_probs: LogProbs) -> tuple[PaddedMicroBatch, Tensor]:
    """Rows padded on the right, and the log-prob of each of their tokens."""
    rows = micro_batch.padded()
    count, width = rows.input_ids.shape
    bounds = torch.arange(count + 1, dtype=torch.int32) * width
    return rows, log_probs(rows.input_ids.flatten(), bounds).view(count, width)


LAYOUTS: Mapping[Layout, LayoutFunction] = {Layout.PACKED: packed, Layout.PADDED: padded}
