"""The contract of a stage: a pure function "record and state in, records and state out". The engine owns the rest.

A stage never mutates state, never reads a clock and never sends: it returns `Outputs`, and the engine applies
and commits them in one Kafka transaction together with the input position. What it wants to remember besides, in
memory only, is in a `TaskLocal` that the engine hands to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollmill.codec import Headers, decode, read_manifest
from rollmill.errors import PoisonRecordError
from rollmill.models import Manifest, Record
from rollmill.topics import Topic

V = TypeVar("V")
L = TypeVar("L", bound="TaskLocal")


@dataclass(frozen=True)
class InputRecord:
    """One record as received. ``topic`` is the registry's entry; ``key`` is empty when the record has none."""

    topic: Topic
    partition: int
    offset: int
    key: bytes
    value: bytes | None
    headers: Headers = ()
    resolved: bytes | PoisonRecordError | None = None
    """Where ``value`` is a reference to a blob: the content of that blob, or why it cannot be read."""

    @property
    def content(self) -> bytes | None:
        """The value, read from its blob where it has one. Raises PoisonRecordError where that is missing or corrupt."""
        if isinstance(self.resolved, PoisonRecordError):
            raise self.resolved
        return self.value if self.resolved is None else self.resolved

    def read(self) -> object:
        """The decoded value by the topic's model. Raises PoisonRecordError."""
        record: object = decode(self.topic.model, self.content, self.headers)
        return record

    @property
    def manifest(self) -> Manifest | None:
        return read_manifest(self.headers)


@dataclass(frozen=True)
class OutputRecord:
    """A record to send. Encoded by the topic's format unless ``value`` is bytes already."""

    topic: Topic
    key: str
    value: Record | bytes | None
    headers: Headers = ()
    partition: int | None = None
    """None: by the key's hash."""


@dataclass(frozen=True)
class StateUpdate:
    """A change of one state key: written to the changelog, and applied by `Processor.apply`.

    ``replaces``: the new payload replaces all earlier ones of its key (one changelog record per key).
    """

    key: str
    payload: bytes
    replaces: bool = False
    manifest: Manifest | None = None
    """The token ranges that the payload holds; written as its header, so that the ledger counts them as pending
    without decoding the payload. In ``state.reward-merger`` a manifest without units means that
    the session's token ranges were sent on downstream."""


@dataclass(frozen=True)
class Outputs:
    """Everything that one record, or one punctuation, causes."""

    records: tuple[OutputRecord, ...] = ()
    updates: tuple[StateUpdate, ...] = ()
    deletes: tuple[str, ...] = ()
    """State keys to delete: all their changelog records get tombstones. Deletes apply before updates."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Increments of the stage's counters, by name (`rollmill.runtime.telemetry.catalogue`); counted once the
    transaction is committed."""
    observed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The same for the stage's histograms: measured values."""

    def __bool__(self) -> bool:
        return bool(self.records or self.updates or self.deletes)


NOTHING = Outputs()


class StateView(Generic[V]):
    """What a stage sees of its task's state: values by state key. Values are immutable."""

    def __init__(self) -> None:
        self._values: dict[str, V] = {}

    def get(self, key: str) -> V | None:
        return self._values.get(key)

    def items(self) -> Iterator[tuple[str, V]]:
        yield from self._values.items()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values


@dataclass(frozen=True)
class TaskContext:
    """A task's time and progress, as `Processor.punctuate` gets them."""

    now: float
    """Seconds since the epoch, from the injected clock."""
    partition: int
    """The task's number p: the partition that timers append to."""
    positions: Mapping[str, int]
    """Next input offset by ``topic/partition``, topic without the prefix."""
    caught_up: bool
    """True: the last poll left nothing unread that it knew of. May never be true while a partition is busy."""
    keeps_up: bool
    """True: everything that was in the log a few seconds ago has been read."""


class TaskLocal:
    """What a stage keeps in memory for one task, besides the task's state. This class keeps nothing.

    What may be in it: caches of what state and records give, where values are stored (memory or a local file), timers'
    notes of what they have seen and requested, counters for log lines. All of it may be lost at any time, so it must
    never decide what a stage puts out, except *when* a timer fires, how often its record is repeated, and from when on
    what has ended is forgotten. It is not in the changelog.

    Life: the engine makes one with `Processor.task_local` when it creates a task, and a fresh one before it restores
    the state. `process`, `apply`, `punctuate` and `gauges` of that task get it, one call at a time, and may change it.
    After a restore, and after each committed transaction, `committed` is called; after a transaction that failed, or
    was broken off, `rolled_back`. Exactly one of the two follows what a transaction applied, and may follow nothing.
    While it is in doubt whether a transaction was committed, neither is called, nor is the stage. `close` is the last
    call. A crash calls nothing.
    """

    def committed(self, state: StateView[Any]) -> None:
        """What was done since the last of these calls is durable; ``state`` has it."""

    def rolled_back(self, state: StateView[Any]) -> None:
        """What was done since the last of these calls never happened; ``state`` is without it again."""

    def close(self) -> None:
        """Release files and the like. Nothing is called any more."""


class Processor(ABC, Generic[V, L]):
    """One consuming service's logic; V: the values of its state, L: what it keeps in memory for one task.

    Pure but for its `TaskLocal`: equal state and input give equal outputs (rule E3), whatever the local holds; neither
    the state's values nor the object itself are changed by a call. One object serves all tasks of a process.
    """

    name: str
    inputs: tuple[Topic, ...]
    state_topic: Topic

    @abstractmethod
    def task_local(self) -> L:
        """A new, empty one, for one task."""

    @abstractmethod
    def process(self, state: StateView[V], record: InputRecord, local: L, /) -> Outputs:
        """Outputs of one record. Raises PoisonRecordError to dead-letter it; nothing is applied then."""

    @abstractmethod
    def apply(self, key: str, value: V | None, payload: bytes, local: L, /) -> V:
        """The new value of a state key: ``value`` (None: absent) with one update's payload folded in.

        The same function serves live processing and restore. It must not change ``value``.
        """

    def punctuate(self, _state: StateView[V], _context: TaskContext, _local: L, /) -> Outputs:
        """Outputs of time passing. Timers only append records to the task's own input (rule E2)."""
        return NOTHING

    def gauges(self, _state: StateView[V], _local: L, /) -> Mapping[str, float]:
        """Values of the stage's gauges by name; called every few seconds, so a pass over the state is fine."""
        return {}
