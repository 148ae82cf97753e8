"""One optimizer step's data for one rank, as the training loop sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmill.errors import InvalidInputError
from rollmill.models import BatchHeader, Denominators, PolicyVersion
from rollmill.trainer.batches.mini_batch import MiniBatch
from rollmill.trainer.batches.minibatch_split import divide
from rollmill.trainer.batches.staleness_filter import FilterResult, denominators
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.layouts.arrays import PackedArrays, pack
from rollmill.trainer.layouts.micro_batch import micro_batch
from rollmill.trainer.layouts.safetensors_reader import PackedBatch

if TYPE_CHECKING:
    from rollmill.trainer.layouts.micro_batch import MicroBatch


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """Iterate over it for micro-batches, the same number on every rank, then `ack` it.

    The loss of a step is the sum over all ranks and micro-batches of ``(surrogate * loss_weight).sum()``, divided by
    ``denominator``. Where gradients are *averaged* over w ranks (DistributedDataParallel), multiply the loss by w.
    """

    records: StepRecords
    verdict: FilterResult
    _acknowledge: Callable[[Step], None]

    @property
    def header(self) -> BatchHeader:
        return self.records.header

    @property
    def number(self) -> int:
        return self.header.step

    @property
    def batch_id(self) -> str:
        return self.header.batch_id

    @property
    def version(self) -> PolicyVersion:
        """The version that the step's staleness was measured against."""
        return self.verdict.version

    @property
    def denominators(self) -> Denominators:
        """Step-wide sums over what is trained, equal on all ranks."""
        return self.verdict.denominators

    @property
    def denominator(self) -> float:
        """Sum of the loss weights of all tokens that the step trains, over all ranks and micro-batches."""
        return self.denominators.weighted_tokens

    @cached_property
    def arrays(self) -> tuple[PackedArrays, ...]:
        """The micro-batches as numpy arrays, stale traces cleared."""
        return tuple(pack(batch, self._kept(batch)) for batch in self.records.batches)

    def summary(self) -> dict[str, Any]:
        """Numbers of the step, plain JSON: what a log line or an experiment tracker shows of it."""
        header, sums = self.header, self.denominators
        return {
            "run": header.run,
            "step": header.step,
            "rank": header.rank,
            "micro_batches": len(self),
            "groups": sums.groups,
            "rollouts": sums.rollouts,
            "tokens": sums.tokens,
            "weighted_tokens": sums.weighted_tokens,
            "policy_version": list(self.version),
            "traces": len(header.table),
            "cleared_traces": self.verdict.cleared,
            "packing_efficiency": header.packing_efficiency,
        }

    def __repr__(self) -> str:
        sums = self.denominators
        return (
            f"<Step {self.number} of run {self.header.run!r}: {len(self)} micro-batches, {sums.groups} groups, "
            f"{sums.rollouts} rollouts, {sums.tokens} tokens to train, policy {self.version}>"
        )

    def __len__(self) -> int:
        return len(self.records.batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch, packed in zip(self.records.batches, self.arrays, strict=True):
            yield micro_batch(packed, filler=batch.header.filler)

    def minibatches(self, n: int) -> Iterator[MiniBatch]:
        """The step in ``n`` parts of whole rollouts, one optimizer step each; `ack` follows the last.

        Fewer where the step has fewer rollouts, the same on every rank. Stale traces are in none.
        """
        yield from self._divided(n, 0)

    def replay(self, epochs: int, minibatches: int = 1) -> Iterator[MiniBatch]:
        """The step ``epochs`` times, each time in ``minibatches`` parts, in another order in each pass.

        The order comes from run, step and pass: it is the same on every rank, and after a restart.
        """
        for epoch in range(epochs):
            parts = self._divided(minibatches, epoch)
            random.Random(f"{self.header.run}/{self.number}/{epoch}").shuffle(parts)  # noqa: S311  # no secret
            yield from parts

    def _divided(self, n: int, epoch: int) -> list[MiniBatch]:
        if n < 1:
            raise InvalidInputError(f"a step is divided into at least one part, not {n}")
        header, partitions = self.header, self.records.partitions
        parts = divide(header.table, self.verdict.kept, partitions, header.world_size // partitions, n)
        return [
            MiniBatch(
                epoch,
                number,
                denominators([header.table[row] for row in part.rows], header.loss_weighting),
                self.arrays,
                part,
                header.rank // partitions,
            )
            for number, part in enumerate(parts)
        ]

    def ack(self) -> None:
        """Acknowledge that the optimizer step is done: outcomes, acknowledgement and position in one transaction.

        Raises InvalidInputError where an earlier step is still open or this one was acknowledged before, FencedError
        where another process has taken this rank, FatalError where the commit failed.
        """
        self._acknowledge(self)

    def _kept(self, batch: PackedBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[N], which of the batch's traces are trained; a filler's never are."""
        rows = batch.trace_index
        if batch.header.filler or not self.verdict.kept:
            return np.zeros(len(rows), np.bool_)
        return np.asarray(np.array(self.verdict.kept)[rows] & (rows >= 0))
