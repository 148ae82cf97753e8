"""One task's memory: the calls of the longest untouched sessions lie in a file while there are too many (rule T7).

What lies where is no part of the state: nothing here changes what a session holds or becomes. Only when there is
nothing left to spill, or no room to spill it to, sessions have to end: the longest idle first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from rollmill.runtime.stream.processor import StateView
from rollmill_builder.sessions.session_state import OpenSession, session_key
from rollmill_builder.storage.call_store import CallStore
from rollmill_builder.storage.spill import SpillFile

SESSION_OVERHEAD = 10_000
"""Bytes of a session besides its calls; `make bench-builder-memory` measures them."""


class MemoryBudget:
    """Keeps a task's sessions below ``most`` bytes, as far as ``file`` (None: nothing is spilled) has room."""

    def __init__(self, most: int, file: SpillFile | None) -> None:
        self._most, self._file = most, file
        self._resident: dict[str, CallStore] = {}
        """By session key, the longest untouched first."""
        self._sizes: dict[str, int] = {}
        self.held = 0
        """Bytes in memory, as far as they are known."""
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
        self._count(key, SESSION_OVERHEAD + store.size)
        self._spill(key)

    def closed(self, key: str) -> None:
        """A session has ended: it is forgotten once that is committed."""
        if key in self._sizes:
            self._closed.add(key)

    def committed(self) -> None:
        for key in self._closed:
            self._forget(key)
        self._settled()

    def rolled_back(self, state: StateView[Any]) -> None:
        """Enter what was touched as ``state`` has it again."""
        for key in list(self._touched):
            session = state.get(key)
            if isinstance(session, OpenSession):
                self.touch(key, session.calls.own_store())
            else:
                self._forget(key)
        self._settled()

    def _settled(self) -> None:
        self._touched.clear()
        self._closed.clear()

    def _forget(self, key: str) -> None:
        self._resident.pop(key, None)
        self.held -= self._sizes.pop(key, 0)

    def reconcile(self, sessions: Sequence[OpenSession]) -> None:
        """Learn what came and went without a word: by a restart, a rollback, or a look at a spilled session."""
        stores = {session_key(item.session_id, item.attempt): item.calls.own_store() for item in sessions}
        for key in [key for key in self._sizes if key not in stores]:
            self._forget(key)
        for key, store in stores.items():
            if not store.spilled and self._resident.get(key) is not store:
                self.touch(key, store)

    def excess(self, sessions: Sequence[OpenSession]) -> Iterator[str]:
        """Keys of the sessions that have to end, the longest idle first, so that the others fit."""
        over = self.held - self._most
        for session in sorted(sessions, key=lambda item: (item.last_at, item.session_id)) if over > 0 else ():
            if over <= 0:
                return
            key = session_key(session.session_id, session.attempt)
            over -= self._sizes.get(key, 0)
            yield key

    def _count(self, key: str, size: int) -> None:
        self.held += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _spill(self, touched: str) -> None:
        if self._file is None:
            return
        for key in self._candidates(touched):
            with suppress(OSError):
                if self._resident[key].spill(self._file):
                    del self._resident[key]
                    self._count(key, SESSION_OVERHEAD)
                    self.spills += 1
                    continue
            return

    def _candidates(self, touched: str) -> Iterable[str]:
        while self.held > self._most:
            key = next(iter(self._resident), touched)
            if key == touched:
                return
            yield key
