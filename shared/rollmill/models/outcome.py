"""Outcomes and dead letters: the final disposition of every sampled token (rule L3)."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Literal

from pydantic import Field

from rollmill.models.base import EventTime, Identifier, NonNegativeInt, PositiveInt, Record, dump_json
from rollmill.models.units import TokenRange


class Disposition(StrEnum):
    """``captured`` opens the account of a unit; exactly one of the others closes it."""

    CAPTURED = "captured"
    TRAINED = "trained"
    EXCLUDED = "excluded"
    DEAD_LETTERED = "dead_lettered"
    REOPENED = "reopened"


class TokenDisposition(Record):
    """Disposition of unit ranges of one session (topic ``outcomes``, key session id)."""

    outcome_id: str
    disposition: Disposition
    reason: str | None = None
    """None for captured and trained."""
    stage: str
    session_id: Identifier
    attempt: PositiveInt = 1
    units: tuple[TokenRange, ...] = ()
    batch_id: str | None = None
    at: EventTime = 0.0

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)


def outcome(
    disposition: Disposition,
    *,
    stage: str,
    session_id: str,
    attempt: int,
    units: tuple[TokenRange, ...],
    reason: str | None = None,
    batch_id: str | None = None,
    at: float = 0.0,
) -> TokenDisposition:
    """An outcome with its deterministic id: equal content gives an equal id."""
    content = [disposition, stage, session_id, attempt, units, reason, batch_id]
    return TokenDisposition(
        outcome_id=hashlib.blake2b(dump_json(content), digest_size=12).hexdigest(),
        disposition=disposition,
        reason=reason,
        stage=stage,
        session_id=session_id,
        attempt=attempt,
        units=units,
        batch_id=batch_id,
        at=at,
    )


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
    """True: an accepted record holds the units that this one carries, so that its death closed no account."""


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
