"""What one task keeps in memory beside its state: an expiry timer, and a budget for its sessions' bytes (rule T7).

Where bytes are stored is no part of the state: nothing here changes what a session holds or becomes. Over the budget,
the calls of the longest untouched sessions move to a file. Only when none is left to spill, or the file has no room,
sessions have to end: the longest idle first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.models import SessionExpired
from rollmill.runtime.stream.processor import StateView, TaskLocal
from rollmill_builder.sessions.expiry_timer import ExpiryTimer
from rollmill_builder.sessions.session_state import OpenSession, session_key
from rollmill_builder.storage.call_store import CallStore
from rollmill_builder.storage.spill import SpillFile

__all__ = ["MemoryBudget", "MemoryLimits", "TaskResources"]

SESSION_OVERHEAD = 10_000
"""Bytes of a session besides its calls; `make bench-builder-memory` measures them."""


@dataclass(frozen=True)
class MemoryLimits:
    """Of one task."""

    memory_bytes: int = 1536 * 2**20
    spill_bytes: int = 16 * 2**30
    """Size of the file for the calls of idle sessions; 0: no such file."""
    spill_directory: Path | None = None
    """None: the system's directory for temporary files."""


class TaskResources(TaskLocal):
    """The memory budget, the expiry timer and the latest wall-clock time of one task."""

    def __init__(self, expiry_seconds: float, limits: MemoryLimits) -> None:
        self._file = SpillFile(limits.spill_directory, limits.spill_bytes) if limits.spill_bytes else None
        self.memory = MemoryBudget(limits.memory_bytes, self._file)
        self._timer = ExpiryTimer(expiry_seconds)
        self.clock: float | None = None
        """Wall-clock time of the last punctuation; None: there was none yet."""

    def expired(self, state: StateView[Any], now: float) -> Iterator[SessionExpired]:
        """The sessions that have to end, by a timer or because memory is short."""
        if self._timer.too_early(now):
            return
        sessions = [value for _, value in state.items() if isinstance(value, OpenSession)]
        self.memory.reconcile(sessions)
        yield from self._timer.due(sessions, now, frozenset(self.memory.excess(sessions)))

    def committed(self, state: StateView[Any]) -> None:  # noqa: ARG002  # the budget recorded what has changed
        self.memory.committed()

    def rolled_back(self, state: StateView[Any]) -> None:
        self.memory.rolled_back(state)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class MemoryBudget:
    """Keeps a task's sessions below ``max_bytes`` bytes, as far as ``file`` (None: nothing is spilled) has room."""

    def __init__(self, max_bytes: int, file: SpillFile | None) -> None:
        self._max_bytes, self._file = max_bytes, file
        self._resident: dict[str, CallStore] = {}
        """Stores in memory by session key, the longest untouched first."""
        self._sizes: dict[str, int] = {}
        """Bytes in memory by session key."""
        self.used_bytes = 0
        """In memory, as far as they are known."""
        self._touched: set[str] = set()
        self._closed: set[str] = set()
        """Keys of what was changed, and what was closed, since the last commit or rollback."""
        self.spills = 0
        """How often a session was moved to the file."""

    def touch(self, key: str, store: CallStore) -> None:
        """A session was changed, or is new."""
        self._touched.add(key)
        self._closed.discard(key)
        self._resident.pop(key, None)
        self._resident[key] = store
        self._set_size(key, SESSION_OVERHEAD + store.size)
        self._spill(key)

    def closed(self, key: str) -> None:
        """A session has ended: it is forgotten once that is committed."""
        if key in self._sizes:
            self._closed.add(key)

    def committed(self) -> None:
        for key in self._closed:
            self._forget(key)
        self._clear_changes()

    def rolled_back(self, state: StateView[Any]) -> None:
        """What was touched is entered again as ``state`` has it now."""
        for key in list(self._touched):
            session = state.get(key)
            if isinstance(session, OpenSession):
                self.touch(key, session.calls.own_store())
            else:
                self._forget(key)
        self._clear_changes()

    def reconcile(self, sessions: Sequence[OpenSession]) -> None:
        """Enter what `touch` and `closed` did not report, such as a spilled session that was read back."""
        stores = {session_key(item.session_id, item.attempt): item.calls.own_store() for item in sessions}
        for key in [key for key in self._sizes if key not in stores]:
            self._forget(key)
        for key, store in stores.items():
            if not store.spilled and self._resident.get(key) is not store:
                self.touch(key, store)

    def excess(self, sessions: Sequence[OpenSession]) -> Iterator[str]:
        """Keys of the sessions that have to end, the longest idle first, so that the others fit."""
        over = self.used_bytes - self._max_bytes
        for session in sorted(sessions, key=lambda item: (item.last_at, item.session_id)) if over > 0 else ():
            if over <= 0:
                return
            key = session_key(session.session_id, session.attempt)
            over -= self._sizes.get(key, 0)
            yield key

    def _clear_changes(self) -> None:
        self._touched.clear()
        self._closed.clear()

    def _forget(self, key: str) -> None:
        self._resident.pop(key, None)
        self.used_bytes -= self._sizes.pop(key, 0)

    def _set_size(self, key: str, size: int) -> None:
        self.used_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _spill(self, touched: str) -> None:
        if self._file is None:
            return
        for key in self._candidates(touched):
            with suppress(OSError):
                if self._resident[key].spill(self._file):
                    del self._resident[key]
                    self._set_size(key, SESSION_OVERHEAD)
                    self.spills += 1
                    continue
            return

    def _candidates(self, touched: str) -> Iterable[str]:
        while self.used_bytes > self._max_bytes:
            key = next(iter(self._resident), touched)
            if key == touched:
                return
            yield key
