"""Headers of dead letters: why a record was set aside, and what was decided about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.models.base import EventTime, NonNegativeInt, Record


class DeadLetterInfo(Record):
    """Why and from where a record was set aside: Kafka header ``dead-letter``; the value is the bytes as received."""

    reason: str
    error: str
    stage: str
    topic: str
    partition: NonNegativeInt
    offset: NonNegativeInt
    headers: tuple[tuple[str, str], ...] = Field(default=(), description="original headers, values as UTF-8 or hex")
    key: str | None = Field(default=None, description="original key in hex where it differs from this record's own")
    units_held: bool = False
    """True: an accepted record holds the units that this one carries, so that its dead letter closed no account."""


class DeadLetterDecision(Record):
    """What a person decided about a dead letter: Kafka header ``dead-letter-decision`` of a record without content.

    It is written to the topic ``dead-letters``, to the partition of the dead letter that it decides, after it.
    """

    decision: Literal["replayed", "dropped"]
    """``replayed``: the bytes as received were written to the source topic again, in the same transaction."""
    partition: NonNegativeInt
    offset: NonNegativeInt
    """Of the letter, in ``dead-letters``."""
    by: str = Field(min_length=1)
    why: str | None = None
    """None only for a replay."""
    at: EventTime
