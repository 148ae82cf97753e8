"""Records to whole steps: record k of M after record k - 1, step s after step s - 1, or a loud error."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.errors import ConfigurationError, FatalError
from rollmill.models import BatchHeader
from rollmill.trainer.wire import WireBatch


@dataclass(frozen=True)
class StepRecords:
    """All micro-batches of one step for one rank."""

    batches: tuple[WireBatch, ...]
    next_offset: int
    """Offset after the last of them."""

    @property
    def header(self) -> BatchHeader:
        """Of the first micro-batch; what it says of the step is the same in all."""
        return self.batches[0].header


@dataclass(frozen=True)
class Expectation:
    """What every header must say."""

    run: str
    policy: str
    rank: int
    world_size: int

    def check(self, header: BatchHeader) -> None:
        if header.world_size != self.world_size:
            raise ConfigurationError(
                f"the steps in the log are cut for world size {header.world_size}, this trainer has "
                f"{self.world_size}: start it with {header.world_size} ranks, or set the batcher to {self.world_size} "
                "and let the trainer finish the steps that are already cut"
            )
        for name in ("run", "policy", "rank"):
            found, expected = getattr(header, name), getattr(self, name)
            if found != expected:
                raise ConfigurationError(f"the batch is of {name} {found!r}, this stream reads {name} {expected!r}")


class StepAssembler:
    """Collects the micro-batches of one step after the other."""

    def __init__(self, expectation: Expectation, next_step: int) -> None:
        self._expectation = expectation
        self._parts: list[WireBatch] = []
        self.next_step = next_step

    def feed(self, offset: int, batch: WireBatch) -> StepRecords | None:
        """The step that this record completes, else None.

        Raises ConfigurationError where the batch is not meant for this stream, FatalError where a record is missing.
        """
        header = batch.header
        self._expectation.check(header)
        if (header.step, header.micro_batch) != (self.next_step, len(self._parts)) or self._differs(header):
            raise FatalError(
                f"offset {offset} holds micro-batch {header.micro_batch} of step {header.step} ({header.batch_id}), "
                f"micro-batch {len(self._parts)} of step {self.next_step} is awaited: batches were deleted or the "
                "position is wrong; load the state of a checkpoint"
            )
        self._parts.append(batch)
        if len(self._parts) < header.micro_batches:
            return None
        step = StepRecords(tuple(self._parts), offset + 1)
        self._parts, self.next_step = [], self.next_step + 1
        return step

    def _differs(self, header: BatchHeader) -> bool:
        first = self._parts[0].header if self._parts else header
        return (header.batch_id, header.micro_batches) != (first.batch_id, first.micro_batches)
