"""What stopped a task, and what an operator decided about it: two records in the task's own changelog (rule T6)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

from pydantic import Field

from rollmill.codec import CONTENT_TYPE, JSON, decode
from rollmill.errors import PoisonRecordError
from rollmill.models.base import EventTime, NonNegativeInt, Record
from rollmill.runtime.stream.dead_letters import MAX_ERROR
from rollmill.runtime.stream.processor import InputRecord

STOPPED = "!stopped"
DECISION = "!decision"
NOTES = (STOPPED, DECISION)

R = TypeVar("R", bound=Record)


class Decision(StrEnum):
    """What the task does with the record in hand, and then goes on."""

    RETRY = "retry"
    """It is processed again, with an empty budget of dead letters."""
    SET_ASIDE = "set_aside"
    """It becomes a dead letter, which can be replayed later."""
    SKIP = "skip"
    """It becomes a dead letter that counts as dropped."""


SKIPPED = "skipped"
"""Reason of a dead letter that counts as dropped."""


class TaskStop(Record):
    """The record that a task has in hand, and why it did not process it."""

    slot: str
    """``topic/partition``."""
    offset: NonNegativeInt
    key: str
    reason: str
    error: str
    at: EventTime


class TaskDecision(Record):
    """About the record at ``slot`` and ``offset``; void once the task is past it."""

    slot: str
    offset: NonNegativeInt
    decision: Decision
    by: str = Field(min_length=1)
    why: str = ""
    at: EventTime

    @property
    def refusal(self) -> PoisonRecordError | None:
        """What the record's dead letter says; None: it is processed again."""
        text = f"by {self.by}{': ' if self.why else ''}{self.why}"
        if self.decision is Decision.SET_ASIDE:
            return PoisonRecordError("set_aside", text)
        return PoisonRecordError("skipped", text) if self.decision is Decision.SKIP else None


@dataclass(frozen=True)
class StopNotes:
    """The two records, as a changelog has them."""

    stop: TaskStop | None = None
    decision: TaskDecision | None = None

    def updated(self, found: Mapping[str, bytes | None]) -> Self:
        """With the records that were found since. An unreadable one counts as none: a person may have written it."""
        stop = _read(TaskStop, found[STOPPED]) if STOPPED in found else self.stop
        decision = _read(TaskDecision, found[DECISION]) if DECISION in found else self.decision
        return type(self)(stop, decision)

    def decided(self, offsets: Mapping[str, int]) -> TaskDecision | None:
        """The decision, where the task is not past its record yet. ``offsets``: next input offset by slot."""
        decision = self.decision
        return None if decision is None or offsets.get(decision.slot, 0) > decision.offset else decision

    def passed(self, offsets: Mapping[str, int]) -> bool:
        """Whether there are notes, and the task is past the records of both."""
        notes = [note for note in (self.stop, self.decision) if note is not None]
        return bool(notes) and all(offsets.get(note.slot, 0) > note.offset for note in notes)


def stop_note(record: InputRecord, slot: str, cause: PoisonRecordError, now: float) -> TaskStop:
    """``now``: seconds since the epoch."""
    key = record.key.decode("utf-8", "backslashreplace")
    error = cause.detail[:MAX_ERROR]
    return TaskStop(slot=slot, offset=record.offset, key=key, reason=cause.reason, error=error, at=now)


def _read(kind: type[R], value: bytes | None) -> R | None:
    with suppress(PoisonRecordError):
        found: R = decode(kind, value, ((CONTENT_TYPE, JSON.encode()),))
        return found
    return None
