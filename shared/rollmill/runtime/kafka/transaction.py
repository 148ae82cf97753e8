"""One Kafka transaction, with what aiokafka leaves to its caller: every send awaited, every await bounded.

aiokafka commits a transaction although a send in it failed, reports a fenced producer in several shapes, and its
``stop`` can hang (``docs/decisions/0002-transactions-on-apache-kafka.md``; rules T3 to T5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, InvalidProducerEpoch, KafkaError, ProducerFenced

from rollmill.codec import Headers
from rollmill.errors import FatalError, FencedError
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.kafka.client_cancellation import without_client_cancellation

STOP_SECONDS = 5.0
FENCED_CODES = (47, 90)
MAX_UNACKNOWLEDGED = 64 * 2**20
"""Bytes in flight of one producer (rule T6): a step of the batcher is one transaction, and may be larger."""
REFUSED_CODES = (2, 10, 18, 32, 44, 87)
"""Corrupt, too large (a record, a batch), bad timestamp, against a policy, invalid."""
FORBIDDEN_CODES = (29, 30, 31, 53, 58)
"""Not allowed: topic, group, cluster, transactional id; and no authentication."""

Offset = int | tuple[int, str]
"""An offset to commit, with metadata where a tuple."""


@dataclass(frozen=True)
class ProducerRecord:
    """One record as it goes to the producer: full topic name, explicit partition."""

    topic: str
    partition: int
    key: bytes
    value: bytes | None
    headers: Headers = ()

    @property
    def size(self) -> int:
        headers = sum(len(name) + len(value or b"") for name, value in self.headers)
        return len(self.key) + len(self.value or b"") + headers


class TransactionFailedError(Exception):
    """A transaction did not commit, or it is unknown whether it did.

    ``refused``: the broker refuses one of its records for what it is, and will do so again. All else may pass.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Transaction:
    """Sends records, an offset commit and nothing else, atomically."""

    def __init__(
        self, producer: AIOKafkaProducer, deadline_seconds: float, failpoints: Failpoints | None = None
    ) -> None:
        self._producer = producer
        self._deadline = deadline_seconds
        self._failpoints = failpoints or Failpoints()

    async def run(
        self, records: Sequence[ProducerRecord], offsets: Mapping[TopicPartition, Offset] | None, group_id: str
    ) -> list[int]:
        """Commit the records and offsets; returns the offset that each record got.

        Raises FencedError when another producer took the transactional id, TransactionFailedError otherwise.
        """
        try:
            async with asyncio.timeout(self._deadline):
                return await without_client_cancellation(self._run(records, offsets, group_id))
        except Exception as error:
            raise translate(error) from error

    async def _run(
        self, records: Sequence[ProducerRecord], offsets: Mapping[TopicPartition, Offset] | None, group_id: str
    ) -> list[int]:
        await self._producer.begin_transaction()
        self._failpoints.reach(Failpoint.TRANSACTION_BEFORE_SENDS)
        written = await self._send(records)
        self._failpoints.reach(Failpoint.TRANSACTION_AFTER_SENDS)
        if offsets:
            await self._producer.send_offsets_to_transaction(dict(offsets), group_id)
        self._failpoints.reach(Failpoint.TRANSACTION_BEFORE_COMMIT)
        await self._producer.commit_transaction()
        self._failpoints.reach(Failpoint.TRANSACTION_AFTER_COMMIT)
        return written

    async def _send(self, records: Sequence[ProducerRecord]) -> list[int]:
        futures: list[asyncio.Future[Any]] = []
        unacknowledged = 0
        for record in records:
            if futures:
                self._failpoints.reach(Failpoint.TRANSACTION_BETWEEN_SENDS)
            unacknowledged += record.size
            if unacknowledged > MAX_UNACKNOWLEDGED:
                await _acknowledged(futures)
                unacknowledged = record.size
            try:
                futures.append(await self._producer.send(*_arguments(record), headers=list(record.headers)))
            except IllegalOperation:  # the transaction has failed meanwhile: a send before this one knows why
                await _acknowledged(futures)
                raise
        return await _acknowledged(futures)


def _arguments(record: ProducerRecord) -> tuple[str, bytes | None, bytes, int]:
    return record.topic, record.value, record.key, record.partition


async def _acknowledged(futures: Sequence[asyncio.Future[Any]]) -> list[int]:
    """Offsets of sent records. Raises a failure, that of fencing first."""
    results: list[Any] = await asyncio.gather(*futures, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise next((failure for failure in failures if is_fenced(failure)), failures[0])
    return [int(result.offset) for result in results]


def is_fenced(error: BaseException) -> bool:
    """Whether the broker knows a newer owner of the transactional id."""
    return isinstance(error, (ProducerFenced, InvalidProducerEpoch)) or getattr(error, "errno", None) in FENCED_CODES


def refuse_forbidden(error: BaseException) -> None:
    """Raise FatalError where this process lacks a permission; trying again would only hide it."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in FORBIDDEN_CODES:
            raise FatalError(f"the broker does not allow this: {type(cause).__name__}: {cause}") from error
        cause = cause.__cause__


def translate(error: Exception) -> Exception:
    """The error of Rollmill for whatever a client call raised."""
    if is_fenced(error):
        return FencedError("another process has taken this task (the broker fenced this producer)")
    if isinstance(error, TimeoutError):
        return TransactionFailedError("the broker did not answer in time")
    if isinstance(error, KafkaError):
        refused = getattr(error, "errno", None) in REFUSED_CODES
        return TransactionFailedError(f"{type(error).__name__}: {error}", refused=refused)
    # AssertionError and IllegalOperation say that the producer is finished; its first error was reported before.
    return TransactionFailedError(f"{type(error).__name__}: {error}")


async def stop_producer(producer: AIOKafkaProducer) -> None:
    """Stop a healthy producer; after the deadline it is abandoned."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await without_client_cancellation(producer.stop())
    except Exception:  # noqa: BLE001  # whatever it is, the process is ending
        await abandon(producer)


async def abandon(producer: AIOKafkaProducer) -> None:
    """Throw a producer away so that it can deliver nothing later: fail what it holds, then stop it, bounded.

    A batch of an idempotent producer never expires and a plain ``stop`` would wait for it (rule T5).
    """
    producer._message_accumulator.fail_all(KafkaError("the producer was abandoned"))  # noqa: SLF001  # no public way
    with suppress(Exception):
        async with asyncio.timeout(STOP_SECONDS):
            await without_client_cancellation(producer.stop())
            return
    sender = producer._sender.sender_task  # noqa: SLF001  # no public way
    if sender is not None:
        sender.cancel()
    with suppress(Exception):
        async with asyncio.timeout(STOP_SECONDS):
            await without_client_cancellation(producer.client.close())
