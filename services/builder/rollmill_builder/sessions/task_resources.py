"""What one task of the builder keeps in memory beside its state: an expiry timer, and where sessions' bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.models import SessionExpired
from rollmill.runtime.stream.processor import StateView, TaskLocal
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


class TaskResources(TaskLocal):
    """The memory budget and the expiry timer of one task."""

    def __init__(self, expiry_seconds: float, limits: MemoryLimits) -> None:
        self._file = SpillFile(limits.spill_directory, limits.spill_bytes) if limits.spill_bytes else None
        self.memory = MemoryBudget(limits.memory_bytes, self._file)
        self._timer = ExpiryTimer(expiry_seconds)

    def expired(self, state: StateView[Any], now: float) -> Iterator[SessionExpired]:
        """The sessions that have to end, by a timer or because memory is short."""
        if self._timer.rests(now):
            return
        sessions = [value for _, value in state.items() if isinstance(value, OpenSession)]
        self.memory.reconcile(sessions)
        yield from self._timer.due(sessions, now, frozenset(self.memory.excess(sessions)))

    def committed(self, state: StateView[Any]) -> None:  # noqa: ARG002  # only that it was
        self.memory.committed()

    def rolled_back(self, state: StateView[Any]) -> None:
        self.memory.rolled_back(state)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
