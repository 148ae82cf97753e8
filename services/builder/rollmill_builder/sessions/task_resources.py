"""What one task of the builder keeps beside its state: its timer, and where its sessions' bytes lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.models import SessionExpired
from rollmill.runtime.stream.processor import StateView
from rollmill_builder.sessions.expiry_timer import ExpiryTimer
from rollmill_builder.sessions.memory_budget import MemoryBudget
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.storage.spill import SpillFile


@dataclass(frozen=True)
class MemoryLimits:
    """Of one task."""

    memory_bytes: int = 1536 * 2**20
    spill_bytes: int = 16 * 2**30
    """Size of the file for the calls of idle sessions; 0: no such file."""
    spill_directory: Path | None = None
    """None: the system's place for temporary files."""


class Shard:
    """One task's own things. All of it may be lost at any moment."""

    def __init__(self, expiry_seconds: float, limits: MemoryLimits) -> None:
        file = SpillFile(limits.spill_directory, limits.spill_bytes) if limits.spill_bytes else None
        self.memory = MemoryBudget(limits.memory_bytes, file)
        self._timer = ExpiryTimer(expiry_seconds)

    def expired(self, state: StateView[Any], now: float) -> Iterator[SessionExpired]:
        """The sessions that have to end, by a timer or because memory is short."""
        if self._timer.rests(now):
            return
        sessions = [value for _, value in state.items() if isinstance(value, OpenSession)]
        self.memory.reconcile(sessions)
        yield from self._timer.due(sessions, now, frozenset(self.memory.excess(sessions)))


class TaskResources(Mapping[int, Shard]):
    """The shards of the tasks in this process, by partition; made when first needed."""

    def __init__(self, make: Callable[[], Shard]) -> None:
        self._make = make
        self._made: dict[int, Shard] = {}

    def __getitem__(self, partition: int) -> Shard:
        if partition not in self._made:
            self._made[partition] = self._make()
        return self._made[partition]

    def __iter__(self) -> Iterator[int]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)
