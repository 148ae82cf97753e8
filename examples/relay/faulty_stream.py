"""A batch stream that hands every mask over one token late, for the demo's own test."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from relay.sabotage import Sabotage
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, PackedArrays, Step


class ShiftedMaskStream(BatchStream):
    """Spoils the arrays that training loop and oracle both read; the step itself stays the one that is acknowledged."""

    def steps(
        self,
        version: Callable[[], tuple[int, int]],
        *,
        until: Callable[[], bool] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Step]:
        for step in super().steps(version, until=until, timeout=timeout):
            vars(step)["arrays"] = tuple(map(_shifted, step.arrays))
            yield step


def _shifted(packed: PackedArrays) -> PackedArrays:
    return replace(packed, loss_mask=np.roll(packed.loss_mask, 1), loss_weight=np.roll(packed.loss_weight, 1))


def make_stream(settings: KafkaSettings, sabotage: Sabotage, rank: int = 0, ranks: int = 1) -> BatchStream:
    kind = ShiftedMaskStream if sabotage is Sabotage.SHIFT_MASK else BatchStream
    return kind(rank, ranks, settings=settings)
