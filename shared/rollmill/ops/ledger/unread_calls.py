"""Sampled tokens that no outcome names yet: calls that the builder has not read, or has set aside (rule L4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from rollmill.codec import Headers, parse
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, PolicyVersion, TokenRange, is_identifier
from rollmill.models.sampled_tokens import captured_units
from rollmill.ops.dlq.dead_letter import DeadLetterIndex, LetterNumber, LetterState
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.log_reader import KafkaRecord, Log
from rollmill.topics import COMPLETIONS, DEAD_LETTERS

TOKEN_BYTES = 4


class UnreadCall(NamedTuple):
    """A call in ``completions`` that the builder has not accepted."""

    session_id: str
    attempt: int
    units: tuple[TokenRange, ...]
    at: float
    """When it was made, in seconds since the epoch; 0.0: unknown."""
    refused: str | None = None
    """Reason of its dead letter; None: it waits."""


@dataclass
class UnreadCalls:
    """What is beyond the builder's position. What an earlier look has read is not read again."""

    claim_check: ClaimCheck
    uncounted: int = 0
    """Records among them with tokens that cannot be counted, for what they hold cannot be read."""
    _found: dict[tuple[int, int], UnreadCall | None] = field(default_factory=dict)
    """By partition and offset; None: unreadable."""
    _ends: Mapping[int, int] = field(default_factory=dict)

    async def look(self, log: Log, positions: Mapping[int, int]) -> list[UnreadCall]:
        """``positions``: the builder's next offset by partition, of one that is not named it has read nothing."""
        kept = {slot: call for slot, call in self._found.items() if slot[1] >= positions.get(slot[0], 0)}
        starts = {number: max(start, self._ends.get(number, 0)) for number, start in positions.items()}
        async for record in log.read(COMPLETIONS, {**self._ends, **starts}):
            slot = (record.partition, record.offset)
            try:
                event = await self.claim_check.read(COMPLETIONS, record.value, tuple(record.headers))
            except PoisonRecordError:
                kept[slot] = None
            else:
                kept |= {slot: call_of(event)} if isinstance(event, CompletionRecord) else {}
        self._found, self._ends = kept, await log.positions()
        calls = [call for call in kept.values() if call is not None]
        self.uncounted = len(kept) - len(calls)
        return calls


@dataclass
class RefusedCalls:
    """The builder's dead letters of calls. Each is read once."""

    claim_check: ClaimCheck
    _letters: DeadLetterIndex = field(default_factory=DeadLetterIndex)
    _calls: dict[LetterNumber, UnreadCall] = field(default_factory=dict)
    _positions: Mapping[int, int] | None = None

    async def look(self, log: Log) -> list[UnreadCall]:
        """A call that was driven again waits, until its outcome says otherwise."""
        async for record in log.read(DEAD_LETTERS, self._positions):
            await self._take(record)
        self._positions = await log.positions()
        return [
            call._replace(refused=None if self._letters.found[number].state is LetterState.REPLAYED else call.refused)
            for number, call in self._calls.items()
        ]

    async def _take(self, record: KafkaRecord) -> None:
        self._letters.take(record)
        number = LetterNumber(record.partition, record.offset)
        letter = self._letters.found.get(number)
        if letter is None:
            return  # a decision about another one
        call = await self._call(record, letter.headers) if letter.info.topic == COMPLETIONS.name else None
        if call is None:
            del self._letters.found[number]
        else:
            self._calls[number] = call._replace(refused=letter.info.reason)

    async def _call(self, record: KafkaRecord, headers: Headers) -> UnreadCall | None:
        try:
            value = await self.claim_check.resolve(record.value)
            return claimed_call(parse(value or b"", headers))
        except PoisonRecordError:
            return None  # no token can be counted in bytes that cannot be read


def call_of(record: CompletionRecord) -> UnreadCall:
    at = max(record.started_at, record.ended_at)
    return UnreadCall(record.session_id, record.attempt, captured_units(record), at)


def claimed_call(data: Any) -> UnreadCall | None:
    """The call that a record describes, also where the model refuses it; None where it names no call and no token."""
    try:
        return call_of(CompletionRecord.model_validate(data))
    except ValueError:
        pass
    if not isinstance(data, dict):
        return None
    session_id, completion_id, attempt = (data.get(name) for name in ("session_id", "completion_id", "attempt"))
    if not _is_name(session_id) or not _is_name(completion_id):
        return None
    units = tuple(_claimed_units(completion_id, data.get("choices")))
    return UnreadCall(session_id, attempt if isinstance(attempt, int) and attempt > 0 else 1, units, 0.0)


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and is_identifier(value)


def _claimed_units(completion_id: str, choices: Any) -> Iterator[TokenRange]:
    """By position, of no version: the model may have refused the index of a choice, or its versions."""
    for index, choice in enumerate(choices if isinstance(choices, list | tuple) else ()):
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        tokens = len(ids) // TOKEN_BYTES if isinstance(ids, bytes) else len(ids) if isinstance(ids, list | tuple) else 0
        if tokens:
            yield TokenRange(completion_id, index, 0, tokens, PolicyVersion(0, 0))
