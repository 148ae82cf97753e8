"""Deciding about dead letters: one transaction per letter, one person at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiokafka import AIOKafkaProducer

from rollmill.codec import DEAD_LETTER_DECISION, JSON, encode, read_manifest
from rollmill.errors import InvalidInputError, RetryableError
from rollmill.models import Disposition, outcome
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.ops.dlq.dead_letter import DeadLetter, LetterState, Place, read_letters, read_value
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import ProducerRecord, Transaction, TransactionFailedError, stop_producer
from rollmill.runtime.stream.processor import OutputRecord
from rollmill.runtime.stream.producer_records import producer_record
from rollmill.runtime.telemetry.clock import Clock
from rollmill.settings import KafkaSettings
from rollmill.topics import DEAD_LETTERS, OUTCOMES, REGISTRY, Partitioning, Topic, partition_of

STAGE = "dlq"
RE_DRIVEN = "re_driven"
RE_DRIVEN_HEADER = "re-driven"
"""Added to a record that is driven again: the number of the letter it was."""
DEADLINE_SECONDS = 20.0


@dataclass
class DeadLetterManager:
    """Decides letters. Whoever opens a desk fences the one before, whose transactions fail then (FencedError)."""

    settings: KafkaSettings
    producer: AIOKafkaProducer
    clock: Clock
    by: str
    letters: dict[Place, DeadLetter]
    """As they are, for they were read behind the fence and nobody else decides."""

    async def replay(self, place: Place, why: str | None = None) -> str | None:
        """Drive a letter again. Returns why nothing was done, None where it was.

        Raises RetryableError where the broker did not answer, InvalidInputError where the source topic is unknown.
        """
        letter = self.letters[place]
        if letter.state is LetterState.REPLAYED:
            return _decided(letter)
        value = await read_value(self.settings, place)
        await self._write(re_driven(letter, value, self.settings), letter, "replayed", why)
        return None

    async def drop(self, place: Place, why: str) -> str | None:
        """Leave a letter dead for good. Returns why nothing was done, None where it was."""
        letter = self.letters[place]
        if letter.state is not LetterState.OPEN:
            return _decided(letter)
        await self._write([], letter, "dropped", why)
        return None

    async def _write(self, records: list[ProducerRecord], letter: DeadLetter, decision: str, why: str | None) -> None:
        word = DeadLetterDecision.model_validate(
            {
                "decision": decision,
                "partition": letter.place.partition,
                "offset": letter.place.offset,
                "by": self.by,
                "why": why,
                "at": self.clock.now(),
            }
        )
        try:
            await Transaction(self.producer, DEADLINE_SECONDS).run(
                [*records, _beside(letter, word, self.settings)], None, ""
            )
        except TransactionFailedError as error:
            raise RetryableError(f"{letter.place} is as it was, or decided whole: {error}; look at it again") from error
        self.letters[letter.place] = replace(letter, decisions=(*letter.decisions, word))


@asynccontextmanager
async def open_manager(settings: KafkaSettings, clock: Clock, by: str) -> AsyncIterator[DeadLetterManager]:
    """A desk; closed at the end."""
    producer = KafkaClients(settings).producer(f"{settings.prefix}{STAGE}")
    await producer.start()
    try:
        yield DeadLetterManager(settings, producer, clock, by, await read_letters(settings))
    finally:
        await stop_producer(producer)


def source_topic(letter: DeadLetter) -> Topic:
    """Where a letter came from. Raises InvalidInputError for a topic that is not in the registry."""
    for topic in REGISTRY:
        if topic.name == letter.info.topic:
            return topic
    raise InvalidInputError(f"{letter.place} came from {letter.info.topic!r}, which is no topic of the registry")


def re_driven(letter: DeadLetter, value: bytes, settings: KafkaSettings) -> list[ProducerRecord]:
    """The record as received, in its source topic, and ``reopened`` where its death had closed an account."""
    topic = source_topic(letter)
    headers = tuple(item for item in letter.headers if item[0] != RE_DRIVEN_HEADER)
    record = ProducerRecord(
        topic.full_name(settings.prefix),
        _partition(letter, topic, settings),
        letter.key,
        value,
        (*headers, (RE_DRIVEN_HEADER, str(letter.place).encode())),
    )
    return [record, *_reopened(letter, settings)]


def _partition(letter: DeadLetter, topic: Topic, settings: KafkaSettings) -> int:
    """By the key, as the pipeline places it: a letter from a wrong partition comes to the right one."""
    if topic.partitioning is Partitioning.SHARED and letter.key:
        return partition_of(letter.key, topic.partitions(settings))
    return letter.info.partition


def _reopened(letter: DeadLetter, settings: KafkaSettings) -> list[ProducerRecord]:
    manifest = read_manifest(letter.headers)
    if manifest is None or not manifest.units or letter.info.units_held:
        return []
    word = outcome(
        Disposition.REOPENED,
        stage=STAGE,
        session_id=manifest.session_id,
        attempt=manifest.attempt,
        units=manifest.units,
        reason=RE_DRIVEN,
    )
    return [producer_record(OutputRecord(OUTCOMES, manifest.session_id, word), settings)]


def _beside(letter: DeadLetter, word: DeadLetterDecision, settings: KafkaSettings) -> ProducerRecord:
    return ProducerRecord(
        DEAD_LETTERS.full_name(settings.prefix),
        letter.place.partition,
        letter.key or str(letter.place).encode(),
        b"",
        ((DEAD_LETTER_DECISION, encode(word, JSON)),),
    )


def _decided(letter: DeadLetter) -> str:
    return f"{letter.place} was {letter.state} already, by {letter.decisions[-1].by}: nothing is done"
