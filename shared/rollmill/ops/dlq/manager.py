"""Decisions about dead letters: one transaction per letter, one operator at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiokafka import AIOKafkaProducer

from rollmill.codec import ADMIT_OLD, DEAD_LETTER_DECISION, JSON, encode, read_manifest
from rollmill.errors import InvalidInputError, RetryableError
from rollmill.models import Disposition, outcome
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.ops.dlq.dead_letter import DeadLetter, LetterNumber, LetterState, read_letters, read_value
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import ProducerRecord, Transaction, TransactionFailedError, stop_producer
from rollmill.runtime.stream.dead_letters import NOT_COPIED
from rollmill.runtime.stream.processor import OutputRecord
from rollmill.runtime.stream.producer_records import producer_record
from rollmill.runtime.telemetry.clock import Clock
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT, DEAD_LETTERS, OUTCOMES, REGISTRY, TRAJECTORIES, Partitioning, Topic, partition_of

STAGE = "dlq"
TOO_OLD = "too_old"
"""Reason of the builder's dead letters of records from before what it remembers (rule S2)."""
RE_DRIVEN = "re_driven"
RE_DRIVEN_HEADER = "re-driven"
"""Added to a record that is driven again: the number of its dead letter."""
DEADLINE_SECONDS = 20.0


@dataclass
class DeadLetterManager:
    """Decides about letters. Opening a manager fences the one before: its transactions fail then (FencedError)."""

    settings: KafkaSettings
    producer: AIOKafkaProducer
    clock: Clock
    by: str
    letters: dict[LetterNumber, DeadLetter]
    """Current, because they were read after the predecessor was fenced."""

    async def replay(self, number: LetterNumber, why: str | None = None, *, admit_old: bool = False) -> str | None:
        """Drive a letter again. Returns why nothing was done; None where the letter was replayed.

        ``admit_old``: the stage takes it also where it may have forgotten the session.
        Raises RetryableError where the broker did not answer, InvalidInputError where the source topic is unknown.
        """
        letter = self.letters[number]
        if letter.state is LetterState.REPLAYED:
            return _decided(letter)
        if letter.info.error.startswith(NOT_COPIED):
            return f"{letter.number} holds no bytes: the record was too large for a dead letter, and is at its source"
        if (refusal := doubling_refusal(letter, admit_old=admit_old)) is not None:
            return refusal
        value = await read_value(self.settings, number)
        await self._write(redrive_records(letter, value, self.settings, admit_old=admit_old), letter, "replayed", why)
        return None

    async def drop(self, number: LetterNumber, why: str) -> str | None:
        """Leave a letter dead for good. Returns why nothing was done; None where the letter was dropped."""
        letter = self.letters[number]
        if letter.state is not LetterState.OPEN:
            return _decided(letter)
        await self._write([], letter, "dropped", why)
        return None

    async def _write(self, records: list[ProducerRecord], letter: DeadLetter, decision: str, why: str | None) -> None:
        record = DeadLetterDecision.model_validate(
            {
                "decision": decision,
                "partition": letter.number.partition,
                "offset": letter.number.offset,
                "by": self.by,
                "why": why,
                "at": self.clock.now(),
            }
        )
        try:
            await Transaction(self.producer, DEADLINE_SECONDS).run(
                [*records, _decision_record(letter, record, self.settings)], None, ""
            )
        except TransactionFailedError as error:
            raise RetryableError(
                f"{letter.number} is either unchanged or decided: {error}; look at it again"
            ) from error
        self.letters[letter.number] = replace(letter, decisions=(*letter.decisions, record))


@asynccontextmanager
async def open_manager(settings: KafkaSettings, clock: Clock, by: str) -> AsyncIterator[DeadLetterManager]:
    """A manager of the letters; closed at the end."""
    producer = KafkaClients(settings).producer(f"{settings.prefix}{STAGE}")
    await producer.start()
    try:
        yield DeadLetterManager(settings, producer, clock, by, await read_letters(settings))
    finally:
        await stop_producer(producer)


def source_topic(letter: DeadLetter) -> Topic:
    """The topic that a letter came from. Raises InvalidInputError for a topic that is not in the registry."""
    for topic in REGISTRY:
        if topic.name == letter.info.topic:
            return topic
    raise InvalidInputError(f"{letter.number} came from {letter.info.topic!r}, which is no topic of the registry")


def doubling_refusal(letter: DeadLetter, *, admit_old: bool) -> str | None:
    """Why a replay of the letter could train tokens twice; None where it cannot.

    A ``conflict`` of a whole trajectory is one again as long as the other one is remembered, and a second trajectory
    of the same session from then on.
    """
    if letter.info.reason == TOO_OLD and not admit_old:
        return (
            f"{letter.number} is too old: its session may have been trained and forgotten. Where it surely was not, "
            "replay it with --admit-old; otherwise drop it"
        )
    if letter.info.reason == "conflict" and letter.info.topic in (BUILT.name, TRAJECTORIES.name):
        return f"{letter.number} is another trajectory of a session that has one: drop it"
    return None


def redrive_records(
    letter: DeadLetter, value: bytes, settings: KafkaSettings, *, admit_old: bool = False
) -> list[ProducerRecord]:
    """The record as received, for its source topic, and ``reopened`` where the dead letter had closed units."""
    topic = source_topic(letter)
    headers = tuple(item for item in letter.headers if item[0] not in (RE_DRIVEN_HEADER, ADMIT_OLD))
    headers = (*headers, *([(ADMIT_OLD, b"1")] if admit_old else ()))
    record = ProducerRecord(
        topic.full_name(settings.prefix),
        _partition(letter, topic, settings),
        letter.key,
        value,
        (*headers, (RE_DRIVEN_HEADER, str(letter.number).encode())),
    )
    return [record, *_reopened(letter, settings)]


def _partition(letter: DeadLetter, topic: Topic, settings: KafkaSettings) -> int:
    """By the key, as in the pipeline: a letter from a wrong partition goes to the right one."""
    if topic.partitioning is Partitioning.SHARED and letter.key:
        return partition_of(letter.key, topic.partitions(settings))
    return letter.info.partition


def _reopened(letter: DeadLetter, settings: KafkaSettings) -> list[ProducerRecord]:
    manifest = read_manifest(letter.headers)
    if manifest is None or not manifest.units or letter.info.units_held:
        return []
    reopened = outcome(
        Disposition.REOPENED,
        stage=STAGE,
        session_id=manifest.session_id,
        attempt=manifest.attempt,
        units=manifest.units,
        reason=RE_DRIVEN,
    )
    return [producer_record(OutputRecord(OUTCOMES, manifest.session_id, reopened), settings)]


def _decision_record(letter: DeadLetter, decision: DeadLetterDecision, settings: KafkaSettings) -> ProducerRecord:
    return ProducerRecord(
        DEAD_LETTERS.full_name(settings.prefix),
        letter.number.partition,
        letter.key or str(letter.number).encode(),
        b"",
        ((DEAD_LETTER_DECISION, encode(decision, JSON)),),
    )


def _decided(letter: DeadLetter) -> str:
    return f"{letter.number} was {letter.state} already, by {letter.decisions[-1].by}: nothing is done"
