"""What a stage is: a pure function "record and state in, records and state out". The engine owns the rest.

A stage never mutates state, never reads a clock and never sends: it returns `Outputs`, and the engine applies
and commits them in one Kafka transaction together with the input position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollmill.codec import Headers, decode, read_manifest
from rollmill.errors import PoisonRecordError
from rollmill.models import Manifest, Record
from rollmill.topics import Topic

V = TypeVar("V")
R = TypeVar("R")


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
    """Where ``value`` is a reference to a blob: what that holds, or why it cannot be had."""

    @property
    def content(self) -> bytes | None:
        """The value, wherever it was kept. Raises PoisonRecordError where its blob is missing or corrupt."""
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
    """A change of one state key, written to the changelog and folded in by `Processor.apply`.

    ``replaces``: the new payload stands for all earlier deltas of its key (one changelog record per key).
    """

    key: str
    payload: bytes
    replaces: bool = False
    manifest: Manifest | None = None
    """The units that the delta holds; written as its header, so that the ledger counts them as pending unread.
    In ``state.reward-merger`` a manifest without units says that the session's units went on downstream."""


@dataclass(frozen=True)
class Outputs:
    """Everything that one record (or one tick) causes."""

    records: tuple[OutputRecord, ...] = ()
    updates: tuple[StateUpdate, ...] = ()
    deletes: tuple[str, ...] = ()
    """State keys that end: all their deltas are tombstoned. Ends apply before deltas."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Increments of the stage's counters, by name (`rollmill.runtime.telemetry.catalogue`); counted once the
    transaction is committed."""
    observed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The same for its histograms: what was measured."""

    def __bool__(self) -> bool:
        return bool(self.records or self.updates or self.deletes)


NOTHING = Outputs()


class StateView(Generic[V]):
    """What a stage sees of its task's state: state keys to folded values. Values are immutable."""

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
    """Where a task stands when a stage is asked to tick."""

    now: float
    """Seconds since the epoch, from the injected clock."""
    partition: int
    """The task's number p: the partition that timers append to."""
    positions: Mapping[str, int]
    """Next input offset by ``topic/partition``, topic without the prefix."""
    caught_up: bool
    """True: the last poll left nothing unread that it knew of. May never hold while a partition is busy."""
    keeps_up: bool
    """True: everything that was in the log a few seconds ago has been read."""


class Processor(ABC, Generic[V]):
    """One consuming service's logic. Pure: equal state and input give equal effects (rule E3)."""

    name: str
    inputs: tuple[Topic, ...]
    state_topic: Topic

    @abstractmethod
    def process(self, state: StateView[V], record: InputRecord) -> Outputs:
        """Effects of one record. Raises PoisonRecordError to dead-letter it; nothing is applied then."""

    @abstractmethod
    def apply(self, key: str, value: V | None, payload: bytes) -> V:
        """The new value of a state key: ``value`` (None: absent) with one delta folded in.

        The same function serves live processing and restore. It must not change ``value``.
        """

    def punctuate(self, state: StateView[V], view: TaskContext) -> Outputs:  # noqa: ARG002  # a stage without timers
        """Effects of time passing. Timers only append records to the task's own input (rule E2)."""
        return NOTHING

    def gauges(self, state: StateView[V]) -> Mapping[str, float]:  # noqa: ARG002  # a stage that shows nothing
        """What the state shows of itself, by name of the gauge; asked every few seconds, so a pass over it is fine."""
        return {}
