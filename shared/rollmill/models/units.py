"""The ledger's unit: a range of sampled tokens of (session, attempt, completion, choice) (rules L1, L2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rollmill.models.base import Identifier, NonNegativeInt, PositiveInt, Record
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
    """The units a record carries, in its Kafka header ``manifest``, so that a dead letter is counted unread."""

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
