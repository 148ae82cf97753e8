"""What a run of the demo is told."""

from dataclasses import dataclass
from enum import StrEnum

from relay.sabotage import Sabotage


class Layout(StrEnum):
    """What the trainer computes on: traces end to end, or as rows that are padded on the right."""

    PACKED = "packed"
    PADDED = "padded"


@dataclass(frozen=True)
class Options:
    steps: int = 40
    """Trained before the drain begins, at most."""
    goal: float = 0.95
    """Mean reward of five steps at which the drain begins."""
    seed: int = 0
    sabotage: Sabotage = Sabotage.NONE
    partitions: int = 2
    """Of the topics that are keyed by session."""
    seconds: float = 600.0
    """Longest time for the loop itself."""
    layout: Layout = Layout.PACKED
    ranks: int = 1
    """Data-parallel ranks of the trainer, and partitions of batches."""
    bootstrap_servers: str | None = None
    """None: an Apache Kafka of its own."""
