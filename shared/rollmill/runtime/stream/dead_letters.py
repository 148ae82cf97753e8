"""Makes dead letters of records, with reason and source; and the budget that stops a bad deploy (rule T6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollmill.codec import DEAD_LETTER, JSON, encode
from rollmill.errors import FatalError, PoisonRecordError
from rollmill.models import DeadLetterInfo, Disposition, token_disposition
from rollmill.runtime.stream.processor import InputRecord, OutputRecord, Outputs
from rollmill.topics import DEAD_LETTERS, OUTCOMES

MAX_ERROR = 2000


def dead_letter(record: InputRecord, stage: str, error: PoisonRecordError) -> Outputs:
    """The dead letter of a record: bytes and headers as received, and the disposition of its token ranges."""
    key = record.key.decode("utf-8", "backslashreplace") or f"{record.topic.name}-{record.partition}"
    info = DeadLetterInfo(
        reason=error.reason,
        error=error.detail[:MAX_ERROR],
        stage=stage,
        topic=record.topic.name,
        partition=record.partition,
        offset=record.offset,
        key=None if key.encode() == record.key else record.key.hex(),
        units_held=error.units_held,
    )
    dead = OutputRecord(
        DEAD_LETTERS,
        key=key,
        value=record.value if record.value is not None else b"",
        headers=(*record.headers, (DEAD_LETTER, encode(info, JSON))),
        partition=record.partition,
    )
    return Outputs(records=(dead, *_dispositions(record, stage, error)), counts={f"dead_letters_{error.reason}": 1})


def _dispositions(record: InputRecord, stage: str, error: PoisonRecordError) -> tuple[OutputRecord, ...]:
    manifest = record.manifest
    if manifest is None or not manifest.units or error.units_held:
        return ()
    disposition = token_disposition(
        Disposition.DEAD_LETTERED,
        stage=stage,
        session_id=manifest.session_id,
        attempt=manifest.attempt,
        units=manifest.units,
        reason=error.reason,
    )
    return (OutputRecord(OUTCOMES, manifest.session_id, disposition),)


@dataclass(frozen=True)
class DeadLetterBudget:
    """A leaky bucket with its level in the task's changelog, so that a crash loop does not drain the topic.

    Every dead letter adds 1; every ``leak`` good records take 1 away; above ``limit`` the task stops.
    """

    limit: int
    leak: int
    level: float = 0.0

    def after(self, *, dead: bool) -> DeadLetterBudget:
        """The budget after one record. Raises FatalError above the limit."""
        level = self.level + 1 if dead else max(0.0, self.level - 1 / self.leak)
        if level > self.limit:
            raise FatalError(
                f"more than {self.limit} dead letters in hand: nothing of this batch is committed. Read the topic "
                "dead-letters, correct the cause, and start again; a higher dead_letter_limit lets the task continue"
            )
        return replace(self, level=level)
