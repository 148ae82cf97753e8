"""An event writer without Kafka: it keeps the records, and acknowledges, fails or waits as the test sets it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollmill.codec import CONTENT_TYPE, Headers, decode
from rollmill.errors import BackpressureError
from rollmill.topics import Topic


@dataclass(frozen=True)
class Appended:
    topic: Topic
    key: str
    value: bytes

    @property
    def record(self) -> Any:
        """The value, decoded by the topic's model."""
        return decode(self.topic.model, self.value, ((CONTENT_TYPE, self.topic.format.encode()),))


@dataclass
class MemoryEventWriter:
    """Clear ``open`` to delay every acknowledgement; set ``failure`` or ``doubt`` to raise it."""

    appended: list[Appended] = field(default_factory=list)
    erased: list[tuple[Topic, str, Headers]] = field(default_factory=list)
    """Tombstones."""
    failure: Exception | None = None
    """Raised by an append that keeps nothing."""
    doubt: Exception | None = None
    """Raised by an append that keeps the record: a lost acknowledgement."""
    full: BackpressureError | None = None
    """Raised by a reservation."""
    reserved: int = 0
    """Bytes that are reserved now."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the first call of `append`."""

    def __post_init__(self) -> None:
        self.open.set()

    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        """Keep the record once ``open`` is set."""
        self.asked.set()
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        self.appended.append(Appended(topic, key, value))
        if self.doubt is not None:
            raise self.doubt

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        """Keep a record as ``append`` does; a tombstone, its headers with it, among ``erased``."""
        if value is not None:
            await self.append(topic, key, value)
        elif self.failure is not None:
            raise self.failure
        else:
            self.erased.append((topic, key, headers))

    @contextmanager
    def reserve_space(self, size: int) -> Iterator[None]:
        """Place for a record of ``size`` bytes; raises ``full`` where that is set."""
        if self.full is not None:
            raise self.full
        self.reserved += size
        try:
            yield
        finally:
            self.reserved -= size

    def of(self, topic: Topic) -> list[Any]:
        """The decoded records of one topic, in order."""
        return [item.record for item in self.appended if item.topic is topic]
