"""Makes dead letters of records, with reason and source; and the budget that stops a bad deploy (rule T6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from rollmill.codec import DEAD_LETTER, JSON, encode
from rollmill.errors import FatalError, PoisonRecordError
from rollmill.models import DeadLetterInfo, Disposition, token_disposition
from rollmill.runtime.stream.processor import InputRecord, OutputRecord, Outputs
from rollmill.topics import DEAD_LETTERS, OUTCOMES

MAX_ERROR = 2000
MAX_KEYS = 256
"""Keys that a budget remembers: they are in every transaction's position."""
NOT_COPIED = "the record could not be copied here, read it at its source"


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


def bare_dead_letter(record: InputRecord, stage: str, error: PoisonRecordError, *, dispositions: bool) -> Outputs:
    """In place of a dead letter that cannot be sent: reason and source only. What was received stays at its source."""
    detail = f"{NOT_COPIED}: {error.detail}".encode("utf-8", "backslashreplace").decode()
    bare = PoisonRecordError(error.reason, detail, units_held=error.units_held or not dispositions)
    letter = dead_letter(replace(record, value=b"", headers=(), resolved=None), stage, bare)
    return replace(letter, records=(*letter.records, *(_dispositions(record, stage, bare) if dispositions else ())))


def refuse_oversized(letter: Outputs) -> Outputs:
    """``letter``. Raises PoisonRecordError where its value and headers together are more than the topic takes."""
    record = letter.records[0]
    value = record.value if isinstance(record.value, bytes) else b""
    size = len(value) + sum(len(name) + len(content or b"") for name, content in record.headers)
    if size > DEAD_LETTERS.max_bytes:
        raise PoisonRecordError("output_too_large", f"{size} bytes for a dead letter, at most {DEAD_LETTERS.max_bytes}")
    return letter


@dataclass(frozen=True)
class Fault:
    """Dead letters of one reason since this process took the task, and where the first of them was read."""

    reason: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count} x {self.reason} (first at {self.first})"


class DeadLetterLimitError(FatalError):
    """One more fault would exceed the limit. Its record is not processed; what came before it is to be committed.

    ``cause``: the fault.
    """

    def __init__(self, message: str, cause: PoisonRecordError) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class DeadLetterBudget:
    """A leaky bucket of our own faults, with level and keys in the task's changelog (rule T6).

    The first fault of a key adds 1, further ones of the key nothing; every ``leak`` good records take 1 away. At level
    0 all keys are forgotten. Above ``limit`` the task stops. Dead letters that a client has caused change nothing.
    """

    limit: int
    leak: int
    level: float = 0.0
    keys: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    def after_success(self) -> DeadLetterBudget:
        if not self.level:
            return self
        level = max(0.0, self.level - 1 / self.leak)
        return replace(self, level=level, keys=self.keys if level else ())

    def after(self, error: PoisonRecordError, record: InputRecord) -> DeadLetterBudget:
        """The budget after one dead letter. Raises DeadLetterLimitError above the limit."""
        if not error.own_fault:
            return self
        place = f"{record.topic.name}/{record.partition}@{record.offset}"
        faults = _with_fault(self.faults, error.reason, place)
        key = blake2b(record.key or place.encode(), digest_size=8).hexdigest()
        if key in self.keys:
            return replace(self, faults=faults)
        if self.level + 1 > self.limit:
            raise DeadLetterLimitError(_over_limit(self.limit, faults), error)
        return replace(self, level=self.level + 1, keys=(*self.keys, key)[-MAX_KEYS:], faults=faults)


def _with_fault(faults: tuple[Fault, ...], reason: str, place: str) -> tuple[Fault, ...]:
    known = {fault.reason: fault for fault in faults}
    earlier = known.get(reason, Fault(reason, 0, place))
    return tuple({**known, reason: replace(earlier, count=earlier.count + 1)}.values())


def _over_limit(limit: int, faults: tuple[Fault, ...]) -> str:
    return (
        f"more than {limit} dead letters in hand by faults of this service: {', '.join(map(str, faults))} since this "
        "process started. The last one is not set aside; those before it are in the topic dead-letters (`rollmill dlq "
        "list`). Correct the cause and start again, or let the task go on with `rollmill tasks`"
    )
