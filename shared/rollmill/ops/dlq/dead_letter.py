"""Dead letters read from the topic: numbered by partition and offset, with the decisions about them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from aiokafka import ConsumerRecord

from rollmill.codec import CONTENT_TYPE, DEAD_LETTER, DEAD_LETTER_DECISION, JSON, Headers, decode, header
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import DeadLetterInfo
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.stream.task_stop import SKIPPED
from rollmill.settings import KafkaSettings
from rollmill.topics import DEAD_LETTERS

UNREADABLE = "unreadable"
UNKNOWN = "unknown"

JSON_HEADERS: Headers = ((CONTENT_TYPE, JSON.encode()),)


class LetterNumber(NamedTuple):
    """Number of a dead letter: its partition and offset in ``dead-letters``, which never change."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> LetterNumber:
        """From ``partition:offset``. Raises InvalidInputError."""
        partition, _, offset = text.partition(":")
        if not (partition.isdecimal() and offset.isdecimal()):
            raise InvalidInputError(f"{text!r} is no number of a dead letter: partition:offset is, as `list` shows it")
        return cls(int(partition), int(offset))


class LetterState(StrEnum):
    OPEN = "open"
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter, without its bytes: they may be many."""

    number: LetterNumber
    info: DeadLetterInfo
    key: bytes
    """As received."""
    headers: Headers
    """As received."""
    size: int
    """Bytes of the value."""
    at: float
    """When it was set aside, by Kafka's clock, in seconds."""
    decisions: tuple[DeadLetterDecision, ...] = ()

    @property
    def state(self) -> LetterState:
        if self.decisions:
            return LetterState(self.decisions[-1].decision)
        return LetterState.DROPPED if self.info.reason == SKIPPED else LetterState.OPEN

    @property
    def source(self) -> str:
        return f"{self.info.topic}/{self.info.partition}@{self.info.offset}"


@dataclass(frozen=True)
class LetterFilter:
    """Which letters; None matches any. ``since``: seconds since the epoch."""

    numbers: frozenset[LetterNumber] | None = None
    stage: str | None = None
    reason: str | None = None
    topic: str | None = None
    key: str | None = None
    since: float | None = None
    state: LetterState | None = None

    def matches(self, letter: DeadLetter) -> bool:
        conditions = (
            (self.stage, letter.info.stage),
            (self.reason, letter.info.reason),
            (self.topic, letter.info.topic),
            (self.key, letter.key.decode("utf-8", "backslashreplace")),
            (self.state, letter.state),
        )
        named = self.numbers is None or letter.number in self.numbers
        recent = self.since is None or letter.at >= self.since
        return named and recent and all(wanted in (None, found) for wanted, found in conditions)


@dataclass
class DeadLetterIndex:
    """Folds the records of ``dead-letters``, in the order of each partition.

    A record without a readable reason or decision is a letter, too, with the reason ``unreadable``.
    """

    found: dict[LetterNumber, DeadLetter] = field(default_factory=dict)

    def take(self, record: ConsumerRecord[bytes, bytes]) -> None:
        number = LetterNumber(record.partition, record.offset)
        headers: Headers = tuple(record.headers)
        try:
            if header(headers, DEAD_LETTER_DECISION) is not None:
                self._decide(decode(DeadLetterDecision, header(headers, DEAD_LETTER_DECISION), JSON_HEADERS))
            else:
                self.found[number] = _letter(number, record, headers)
        except PoisonRecordError as error:
            self.found[number] = _unreadable(number, record, headers, error)

    def _decide(self, decision: DeadLetterDecision) -> None:
        number = LetterNumber(decision.partition, decision.offset)
        letter = self.found.get(number)
        if letter is not None:
            self.found[number] = replace(letter, decisions=(*letter.decisions, decision))


def _letter(number: LetterNumber, record: ConsumerRecord[bytes, bytes], headers: Headers) -> DeadLetter:
    info: DeadLetterInfo = decode(DeadLetterInfo, header(headers, DEAD_LETTER), JSON_HEADERS)
    try:
        key = (record.key or b"") if info.key is None else bytes.fromhex(info.key)
    except ValueError as error:
        raise PoisonRecordError("invalid", f"the key is not in hexadecimal: {error}") from error
    return DeadLetter(
        number=number,
        info=info,
        key=key,
        headers=_received(headers),
        size=len(record.value or b""),
        at=record.timestamp / 1000,
    )


def _unreadable(
    number: LetterNumber, record: ConsumerRecord[bytes, bytes], headers: Headers, error: PoisonRecordError
) -> DeadLetter:
    """Its source is unknown: it can be shown and dropped, but not replayed."""
    info = DeadLetterInfo(
        reason=UNREADABLE,
        error=str(error),
        stage=UNKNOWN,
        topic=UNKNOWN,
        partition=number.partition,
        offset=number.offset,
    )
    return DeadLetter(number, info, record.key or b"", headers, len(record.value or b""), record.timestamp / 1000)


def _received(headers: Headers) -> Headers:
    """Without the last ``dead-letter`` header: it was added when the record was set aside."""
    added = max(index for index, (name, _) in enumerate(headers) if name == DEAD_LETTER)
    return (*headers[:added], *headers[added + 1 :])


async def read_letters(settings: KafkaSettings) -> dict[LetterNumber, DeadLetter]:
    """All letters, in the order of their numbers."""
    letters = DeadLetterIndex()
    async with Log.open(settings) as log:
        async for record in log.read(DEAD_LETTERS):
            letters.take(record)
    return dict(sorted(letters.found.items()))


async def read_value(settings: KafkaSettings, number: LetterNumber) -> bytes:
    """The bytes of a letter, as received."""
    async with Log.open(settings) as log:
        return (await log.at(DEAD_LETTERS, number.partition, number.offset)).value or b""


def select_letters(letters: dict[LetterNumber, DeadLetter], wanted: LetterFilter) -> list[DeadLetter]:
    """Those that match ``wanted``. Raises InvalidInputError where no letter has a number that it names."""
    missing = sorted((wanted.numbers or frozenset()) - set(letters))
    if missing:
        raise InvalidInputError(f"there is no dead letter {', '.join(map(str, missing))}")
    return [letter for letter in letters.values() if wanted.matches(letter)]
