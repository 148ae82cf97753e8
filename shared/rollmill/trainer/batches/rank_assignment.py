"""Which partitions of ``batches`` a rank reads: steps cut for w ranks, read by m (rule R4)."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.errors import ConfigurationError


class OtherWorldSizeError(ConfigurationError):
    """The steps in the log are cut for ``found`` ranks."""

    def __init__(self, found: int, ranks: int, next_step: int | None = None) -> None:
        divisors = ", ".join(str(count) for count in range(1, found + 1) if found % count == 0)
        super().__init__(
            f"the steps in the log are cut for world size {found}, this trainer has {ranks}: start it with a number of "
            f"ranks that divides {found} ({divisors}), or return the steps that are not acknowledged to the batcher, "
            f"which lays them out anew: {return_command(ranks, next_step)}"
        )
        self.found = found


def return_command(world_size: int, next_step: int | None = None) -> str:
    """The command for the operator; ``next_step``: a step before the first that is not acknowledged."""
    first = "" if next_step is None else f" --from-step {next_step}"
    return f"`rollmill batches return --world-size {world_size}{first}`"


@dataclass(frozen=True)
class RankAssignment:
    """What rank ``rank`` of ``ranks`` reads of steps cut for ``world_size`` ranks."""

    rank: int
    ranks: int
    world_size: int

    @classmethod
    def of(cls, rank: int, ranks: int, world_size: int, next_step: int | None = None) -> RankAssignment:
        """Raises OtherWorldSizeError where the ranks do not divide the world size.

        ``next_step``: of the checkpoint that is loaded, for the error message.
        """
        if world_size % ranks:
            raise OtherWorldSizeError(world_size, ranks, next_step)
        return cls(rank, ranks, world_size)

    @property
    def size(self) -> int:
        return self.world_size // self.ranks

    @property
    def partitions(self) -> range:
        """Ranks that the batcher cut for; each has the partition of its number."""
        return range(self.rank * self.size, (self.rank + 1) * self.size)
