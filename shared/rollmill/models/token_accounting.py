"""Which sampled tokens a record carries, and the final disposition of each (rules L1 to L3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from rollmill.models.base import EventTime, Identifier, NonNegativeInt, PositiveInt, Record, dump_json
from rollmill.models.versions import PolicyVersion


class TokenRange(NamedTuple):
    """Tokens ``start`` (inclusive) to ``stop`` (exclusive) of one sampled reply, all of one policy version.

    Wire form ``[completion_id, choice, start, stop, [epoch, version]]``.
    """

    completion_id: Identifier
    choice: NonNegativeInt
    start: NonNegativeInt
    stop: NonNegativeInt
    version: PolicyVersion

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class Manifest(Record):
    """The token ranges that a record carries: its Kafka header ``manifest``, readable where its value is not."""

    session_id: Identifier
    attempt: PositiveInt = 1
    units: tuple[TokenRange, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)


def tokens_by_version(units: Iterable[TokenRange]) -> dict[PolicyVersion, int]:
    counts: dict[PolicyVersion, int] = {}
    for unit in units:
        counts[unit.version] = counts.get(unit.version, 0) + unit.tokens
    return counts


class Disposition(StrEnum):
    """``captured`` opens the account of a token range; exactly one of the others closes it."""

    CAPTURED = "captured"
    TRAINED = "trained"
    EXCLUDED = "excluded"
    DEAD_LETTERED = "dead_lettered"
    REOPENED = "reopened"


class TokenDisposition(Record):
    """Disposition of token ranges of one session (topic ``outcomes``, key session id)."""

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


def token_disposition(
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
    """A `TokenDisposition` with its deterministic id: equal content gives an equal id."""
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


outcome = token_disposition
"""The name before, which stays."""
