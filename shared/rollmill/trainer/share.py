"""Which partitions of ``batches`` a rank reads: steps cut for w ranks, read by m (RULES R4)."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.errors import ConfigurationError


class OtherWorldSizeError(ConfigurationError):
    """The steps in the log are cut for ``found`` ranks."""

    def __init__(self, found: int, ranks: int) -> None:
        divisors = ", ".join(str(count) for count in range(1, found + 1) if found % count == 0)
        super().__init__(
            f"the steps in the log are cut for world size {found}, this trainer has {ranks}: start it with a number of "
            f"ranks that divides {found} ({divisors}), or give the run a prefix of its own and its batcher world size "
            f"{ranks}"
        )
        self.found = found


@dataclass(frozen=True)
class Share:
    """The part of rank ``rank`` of ``ranks`` in steps cut for ``world_size``."""

    rank: int
    ranks: int
    world_size: int

    @classmethod
    def of(cls, rank: int, ranks: int, world_size: int) -> Share:
        """Raises OtherWorldSizeError where the ranks do not divide the world size."""
        if world_size % ranks:
            raise OtherWorldSizeError(world_size, ranks)
        return cls(rank, ranks, world_size)

    @property
    def size(self) -> int:
        return self.world_size // self.ranks

    @property
    def partitions(self) -> range:
        """Ranks that the batcher cut for; each has the partition of its number."""
        return range(self.rank * self.size, (self.rank + 1) * self.size)
