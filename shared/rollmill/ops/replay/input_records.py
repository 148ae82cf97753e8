"""Records of a log as the stages receive them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rollmill.errors import PoisonRecordError
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.task_consumer import resolved
from rollmill.topics import Topic


async def records(log: Log, topic: Topic, only: int | None = None) -> AsyncIterator[InputRecord]:
    """All records of a topic, or of one partition, in order within each partition; large values from object storage."""
    claims = ClaimCheck.of(log.settings)
    async for raw in log.read(topic, only=only):
        received = InputRecord(topic, raw.partition, raw.offset, raw.key or b"", raw.value, tuple(raw.headers))
        yield await resolved(received, claims)


def readable(record: InputRecord) -> Any:
    """The decoded value; None for an unreadable record, which the live run wrote to the dead letters."""
    try:
        return record.read()
    except PoisonRecordError:
        return None
