"""Records to whole steps: record k of M after record k - 1, step s after step s - 1; anything else is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmill.errors import ConfigurationError, FatalError
from rollmill.models import BatchHeader
from rollmill.trainer.batches.rank_assignment import OtherWorldSizeError
from rollmill.trainer.layouts.safetensors_reader import PackedBatch


@dataclass(frozen=True)
class StepRecords:
    """All micro-batches of one step for one rank, one partition after the other."""

    batches: tuple[PackedBatch, ...]
    offsets: Mapping[int, int]
    """By partition the offset after the last of them."""

    @property
    def header(self) -> BatchHeader:
        """Of the first micro-batch; the fields about the step are equal in all."""
        return self.batches[0].header

    @property
    def headers(self) -> tuple[BatchHeader, ...]:
        """One of each partition."""
        return tuple(batch.header for batch in self.batches if batch.header.micro_batch == 0)

    @property
    def partitions(self) -> int:
        """Number of partitions that one rank reads; equal for every rank of the step."""
        return len(self.offsets)


def join_partitions(parts: Sequence[StepRecords]) -> StepRecords:
    """One step from its parts in several partitions. Raises FatalError where they are of different steps."""
    if len({part.header.batch_id for part in parts}) > 1:
        found = ", ".join(f"{part.header.batch_id} in partition {part.header.rank}" for part in parts)
        raise FatalError(f"step {parts[0].header.step} is not one step: {found}")
    batches = tuple(batch for part in parts for batch in part.batches)
    return StepRecords(batches, {number: offset for part in parts for number, offset in part.offsets.items()})


@dataclass(frozen=True)
class Expectation:
    """What every header of one partition must hold."""

    run: str
    policy: str
    rank: int
    """The rank that the batcher cut for, which is the partition's number."""
    world_size: int
    readers: int = 1
    """Ranks of this trainer."""
    placement: int = 0
    """Records of a lower placement are void and are skipped."""
    fingerprints: frozenset[str] | None = None
    """Tokenizer, chat template and model that all traces have to be of; None: any."""

    def check(self, header: BatchHeader) -> None:
        for name in ("run", "policy", "rank"):
            found, expected = getattr(header, name), getattr(self, name)
            if found != expected:
                raise ConfigurationError(f"the batch is of {name} {found!r}, this stream reads {name} {expected!r}")
        if header.placement > self.placement:
            raise ConfigurationError(
                f"steps were returned to the batcher and laid out anew for {header.world_size} ranks while this "
                "trainer ran: start it again with so many"
            )
        if header.world_size != self.world_size:
            raise OtherWorldSizeError(header.world_size, self.readers)
        if self.fingerprints is not None:
            check_fingerprints(header, self.fingerprints)


def check_fingerprints(header: BatchHeader, expected: frozenset[str]) -> None:
    """Raises ConfigurationError where a trace has another fingerprint of tokenizer, template and model, or none."""
    others = {name: count for name, count in header.fingerprints.items() if name not in expected}
    unknown = len(header.table) - sum(header.fingerprints.values())
    if not (others or unknown):
        return
    came = [f"{count} of {name!r}" for name, count in sorted(others.items())]
    came += [f"{unknown} without a fingerprint"] if unknown else []
    raise ConfigurationError(
        f"step {header.step} is not of the tokenizer, chat template and model that this trainer expects: of its "
        f"{len(header.table)} traces {', '.join(came)}, expected {', '.join(map(repr, sorted(expected)))}; load the "
        "model that sampled them, set `fingerprint` on capture's routes to what the engine runs, or name all that may "
        "come in BatchStream(expect=...)"
    )


class StepAssembler:
    """Collects micro-batches into steps, one step after the other."""

    def __init__(self, expectation: Expectation, next_step: int) -> None:
        self._expectation = expectation
        self._parts: list[PackedBatch] = []
        self.next_step = next_step

    def feed(self, offset: int, batch: PackedBatch) -> StepRecords | None:
        """The step that this record completes, else None, also for a void record.

        Raises ConfigurationError (OtherWorldSizeError) where the batch is not meant for this stream, FatalError where
        a record is missing.
        """
        header = batch.header
        if header.placement < self._expectation.placement:
            return None
        self._expectation.check(header)
        if (header.step, header.micro_batch) != (self.next_step, len(self._parts)) or self._differs(header):
            raise FatalError(
                f"offset {offset} holds micro-batch {header.micro_batch} of step {header.step} ({header.batch_id}), "
                f"micro-batch {len(self._parts)} of step {self.next_step} is expected: batches were deleted or the "
                "position is wrong; load the state of a checkpoint"
            )
        self._parts.append(batch)
        if len(self._parts) < header.micro_batches:
            return None
        step = StepRecords(tuple(self._parts), {header.rank: offset + 1})
        self._parts, self.next_step = [], self.next_step + 1
        return step

    def _differs(self, header: BatchHeader) -> bool:
        first = self._parts[0].header if self._parts else header
        return (header.batch_id, header.micro_batches) != (first.batch_id, first.micro_batches)
