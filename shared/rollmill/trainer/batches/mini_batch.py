"""A part of a step that is trained with its own optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rollmill.models import Denominators
from rollmill.trainer.batches.minibatch_split import MiniBatchPlan
from rollmill.trainer.layouts.arrays import PackedArrays
from rollmill.trainer.layouts.micro_batch import micro_batch
from rollmill.trainer.layouts.trace_slicing import filler_of, join, select

if TYPE_CHECKING:
    from rollmill.trainer.layouts.micro_batch import MicroBatch


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Iterate over it for micro-batches, the same number on every rank; fillers keep the ranks in step.

    Its loss is the sum over all ranks and micro-batches of ``(surrogate * loss_weight).sum()``, divided by
    ``denominator``.
    """

    epoch: int
    """Pass over the step, from 0."""
    number: int
    """Within the pass, from 0."""
    denominators: Denominators
    """Sums over this mini-batch on all ranks."""
    _source: Sequence[PackedArrays]
    _part: MiniBatchPlan
    _rank: int

    @property
    def denominator(self) -> float:
        return self.denominators.weighted_tokens

    @cached_property
    def arrays(self) -> tuple[PackedArrays, ...]:
        """The micro-batches as numpy arrays."""
        return tuple(self._gather(rows) for rows in self._part.micro_batches[self._rank])

    def __len__(self) -> int:
        return len(self._part.micro_batches[self._rank])

    def __iter__(self) -> Iterator[MicroBatch]:
        for packed, rows in zip(self.arrays, self._part.micro_batches[self._rank], strict=True):
            yield micro_batch(packed, filler=not rows)

    def _gather(self, rows: tuple[int, ...]) -> PackedArrays:
        if not rows:
            return filler_of(self._source[0])
        chosen = [np.isin(packed.trace_index, rows) for packed in self._source]
        return join([select(packed, each) for packed, each in zip(self._source, chosen, strict=True) if each.any()])
