"""Position of a stream: what a trainer's checkpoint keeps, and what is committed with every step (rule R3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import orjson
from aiokafka import TopicPartition
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from rollmill.errors import ConfigurationError
from rollmill.models import Identifier, Record, dump_json
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import Offset
from rollmill.settings import KafkaSettings
from rollmill.trainer.batches.rank_assignment import RankAssignment
from rollmill.trainer.committed_offsets import list_committed


class StreamState(Record):
    """Position after the last acknowledged step. Offsets have gaps, so the step is counted separately."""

    run: Identifier
    epoch: NonNegativeInt = 0
    """Epoch of the policy that the last acknowledged step was handed to."""
    next_step: NonNegativeInt
    offsets: dict[str, NonNegativeInt]
    """Next offset by partition of ``batches``."""
    world_size: PositiveInt
    placement: NonNegativeInt = 0
    """Of the records that the offsets are of (`BatchHeader.placement`)."""

    @classmethod
    def untouched(cls, run: str, assignment: RankAssignment) -> Self:
        """Nothing acknowledged yet: step 0 is expected; it is the first in the log, or was deleted."""
        offsets = {str(number): 0 for number in assignment.partitions}
        return cls(run=run, next_step=0, offsets=offsets, world_size=assignment.world_size)

    def dump(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, value: object) -> Self:
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigurationError(f"this is no state of a batch stream: {error}") from error

    def check(self, *, run: str, assignment: RankAssignment) -> dict[int, int]:
        """The offsets to read from; raises ConfigurationError where the state is of another stream."""
        if self.run != run:
            raise ConfigurationError(f"the state belongs to run {self.run!r}, this stream reads run {run!r}")
        wanted = set(map(str, assignment.partitions))
        if self.world_size != assignment.world_size or set(self.offsets) != wanted:
            raise ConfigurationError(
                f"the state is of partition {', '.join(self.offsets)} of {self.world_size}, rank {assignment.rank} of "
                f"{assignment.ranks} reads {', '.join(sorted(wanted))} of {assignment.world_size}: give "
                "load_state_dict the states of all ranks of the checkpoint"
            )
        return {int(number): offset for number, offset in self.offsets.items()}

    @classmethod
    def of_ranks(cls, states: Sequence[Self]) -> Self:
        """One state with the partitions of all. Raises ConfigurationError where they are not of one checkpoint."""
        first = states[0]
        alike = {(each.run, each.epoch, each.next_step, each.world_size, each.placement) for each in states}
        if len(alike) > 1:
            raise ConfigurationError(
                f"the states are not of one checkpoint: (run, epoch, step, ranks, placement) {sorted(alike)}"
            )
        offsets = {number: offset for each in states for number, offset in each.offsets.items()}
        return first.replace(offsets=offsets)

    def narrowed(self, assignment: RankAssignment) -> Self:
        """With the partitions of one rank only."""
        kept = {number: offset for number, offset in self.offsets.items() if int(number) in assignment.partitions}
        return self.replace(offsets=kept)


def rank_group(settings: KafkaSettings, rank: int) -> str:
    """The consumer group of a rank, which is its transactional id, too."""
    return f"{settings.prefix}trainer.{rank}"


def offsets_of(state: StreamState, topic: str) -> dict[TopicPartition, Offset]:
    """What to commit for a state; the metadata is some hundred bytes of 4 KiB."""
    metadata = dump_json(state.dump()).decode()
    return {TopicPartition(topic, int(number)): (offset, metadata) for number, offset in state.offsets.items()}


async def read_committed(clients: KafkaClients, group_id: str, topic: str) -> StreamState | None:
    """The state committed last; None where the group has committed nothing.

    Where partitions of a former world size are left, the state that is furthest ahead counts.
    """
    found = await list_committed(clients, group_id, topic)
    states = [_parse(metadata, group_id) for _, metadata in found.values()]
    return max(states, key=lambda state: (state.placement, state.next_step), default=None)


def _parse(metadata: str, group_id: str) -> StreamState:
    try:
        return StreamState.read(orjson.loads(metadata))
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"group {group_id} was committed by another program: {metadata!r}") from error
