"""A task's state: folded values, the changelog keys behind them, and undo to the last commit (rule G1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from rollmill.models import Manifest
from rollmill.runtime.stream.processor import L, Outputs, Processor, StateView

V = TypeVar("V")

Apply = Callable[[str, V | None, bytes], V]
Savepoint = dict[str, tuple[V | None, tuple[str, ...]]]
"""Values and changelog keys of some state keys."""


@dataclass(frozen=True)
class ChangelogRecord:
    """One record for the changelog; ``payload`` None is a tombstone."""

    key: str
    payload: bytes | None
    manifest: Manifest | None = None


def update_key(state_key: str, origin: str, index: int) -> str:
    """Changelog key of an update: sorts by input offset within a state key.

    ``origin`` is `origin_of` an input record; ``index`` is the update's place among those of one record.
    """
    return f"{state_key}/{origin}.{index}"


def origin_of(topic_index: int, partition: int, offset: int) -> str:
    """Sortable name of an input record: topic letter, partition, zero-padded offset."""
    return f"{chr(ord('a') + topic_index)}{partition:05d}.{offset:020d}"


REPLACING = "="
REPLACED = f"/{REPLACING}"


def _state_key(changelog_key: bytes) -> bytes:
    """The state key that a changelog key belongs to."""
    return changelog_key.rpartition(b"/")[0]


class TaskState(StateView[V], Generic[V]):
    """Folded values, the changelog keys behind them, and what `rollback` needs to return to the last `commit`."""

    def __init__(self, apply: Apply[V]) -> None:
        super().__init__()
        self._apply = apply
        self._changelog_keys: dict[str, tuple[str, ...]] = {}
        self._undo: dict[str, tuple[V | None, tuple[str, ...]]] = {}

    @classmethod
    def of(cls, stage: Processor[V, L], local: L) -> TaskState[V]:
        """Empty, folded by ``stage`` with one task's ``local``."""
        return cls(lambda key, value, payload: stage.apply(key, value, payload, local))

    def stage(self, outputs: Outputs, origin: str) -> list[ChangelogRecord]:
        """Apply deletes, then updates; returns what the changelog must hold for them."""
        records: list[ChangelogRecord] = []
        for key in outputs.deletes:
            records += self._delete(key)
        for index, update in enumerate(outputs.updates):
            name = f"{update.key}/{REPLACING}" if update.replaces else update_key(update.key, origin, index)
            if update.replaces:
                records += self._tombstones_of_others(update.key, name)
            self._apply_update(update.key, name, update.payload, replaces=update.replaces)
            records.append(ChangelogRecord(name, update.payload, update.manifest))
        return _newest(records)

    def savepoint(self, outputs: Outputs) -> Savepoint[V]:
        """What `return_to` needs to undo these outputs alone."""
        keys = {*outputs.deletes, *(update.key for update in outputs.updates)}
        return {key: (self._values.get(key), self._changelog_keys.get(key, ())) for key in keys}

    def return_to(self, savepoint: Savepoint[V]) -> None:
        for key, (value, changelog_keys) in savepoint.items():
            self._put(key, value, changelog_keys)

    def restore(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Fold live changelog records, in the order of their keys; the same `apply` as live processing."""
        for _ in self.restoring({name.encode(): payload for name, payload in records}):
            pass

    def restoring(self, live: dict[bytes, bytes]) -> Iterator[None]:
        """`restore` record by record. Payloads leave ``live`` as they are folded, so that they are held once."""
        ordered = sorted(live, key=lambda name: (_state_key(name), name))
        for key, group in groupby(ordered, key=_state_key):
            changelog_keys = tuple(name.decode() for name in group)
            value: V | None = None
            for name in changelog_keys:
                before = None if name.endswith(REPLACED) else value
                value = self._apply(key.decode(), before, live.pop(name.encode()))
                yield
            self._put(key.decode(), value, changelog_keys)

    def commit(self) -> None:
        self._undo.clear()

    def rollback(self) -> None:
        """Return every key to its value at the last commit."""
        for key, (value, changelog_keys) in self._undo.items():
            self._put(key, value, changelog_keys)
        self._undo.clear()

    def _apply_update(self, key: str, name: str, payload: bytes, *, replaces: bool) -> None:
        self._save_for_undo(key)
        before = None if replaces else self._values.get(key)
        changelog_keys = () if replaces else self._changelog_keys.get(key, ())
        self._put(key, self._apply(key, before, payload), (*changelog_keys, name))

    def _delete(self, key: str) -> list[ChangelogRecord]:
        self._save_for_undo(key)
        changelog_keys = self._changelog_keys.get(key, ())
        self._put(key, None, ())
        return [ChangelogRecord(name, None) for name in changelog_keys]

    def _tombstones_of_others(self, key: str, keep: str) -> list[ChangelogRecord]:
        return [ChangelogRecord(name, None) for name in self._changelog_keys.get(key, ()) if name != keep]

    def _save_for_undo(self, key: str) -> None:
        self._undo.setdefault(key, (self._values.get(key), self._changelog_keys.get(key, ())))

    def _put(self, key: str, value: V | None, changelog_keys: tuple[str, ...]) -> None:
        if value is None:
            self._values.pop(key, None)
            self._changelog_keys.pop(key, None)
        else:
            self._values[key] = value
            self._changelog_keys[key] = changelog_keys


def _newest(records: list[ChangelogRecord]) -> list[ChangelogRecord]:
    """The newest record per key: one transaction needs no more."""
    return list({record.key: record for record in records}.values())
