"""Where a stream stands: what a trainer's checkpoint keeps, and what is committed with every step (RULES R3)."""

from __future__ import annotations

from typing import Any, Self

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from rollmill.errors import ConfigurationError
from rollmill.models import Identifier, Record


class StreamState(Record):
    """Position after the last acknowledged step. Offsets have gaps, so the step is counted on its own."""

    run: Identifier
    epoch: NonNegativeInt = 0
    """Epoch of the policy that the last acknowledged step was handed to."""
    next_step: NonNegativeInt
    offsets: dict[str, NonNegativeInt]
    """Next offset by partition of ``batches``."""
    world_size: PositiveInt

    def dump(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, value: object) -> Self:
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigurationError(f"this is no state of a batch stream: {error}") from error

    def check(self, *, run: str, world_size: int, partition: int) -> int:
        """The offset to go on from; raises ConfigurationError where the state belongs to another stream."""
        if self.run != run:
            raise ConfigurationError(f"the state belongs to run {self.run!r}, this stream reads run {run!r}")
        if self.world_size != world_size:
            raise ConfigurationError(
                f"the state was written with world size {self.world_size}, this trainer has {world_size}: the steps "
                f"in the log are cut for {self.world_size} ranks, so start it with {self.world_size}"
            )
        if set(self.offsets) != {str(partition)}:
            raise ConfigurationError(f"the state belongs to rank {', '.join(self.offsets)}, this is rank {partition}")
        return self.offsets[str(partition)]
