"""The one transactional producer of a rank or publisher; starting it fences its predecessor (rules R3, T4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaProducer, TopicPartition

from rollmill.errors import FatalError, FencedError
from rollmill.runtime.failpoints import Failpoints
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.connection_diagnostics import diagnose_refusal
from rollmill.runtime.kafka.transaction import (
    Offset,
    ProducerRecord,
    Transaction,
    TransactionFailedError,
    abandon,
    translate,
)

DEADLINE_SHARE = 2 / 3
"""Share of the transaction timeout: a transaction is abandoned before the broker aborts it."""


class TransactionalWriter:
    """Writes records and offsets, one transaction at a time.

    After a failed transaction it is unknown what was committed, and a new producer could fence a rightful successor, so
    the writer stays closed: the trainer starts again from its checkpoint.
    """

    def __init__(
        self,
        clients: KafkaClients,
        transactional_id: str,
        transaction_timeout_ms: int,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._clients = clients
        self.transactional_id = transactional_id
        self._failpoints = failpoints or Failpoints()
        self.deadline_seconds = transaction_timeout_ms / 1000 * DEADLINE_SHARE
        self._producer: AIOKafkaProducer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Fence the predecessor and end its open transaction; does nothing where the producer runs already.

        Raises FatalError where the broker does not answer.
        """
        if self._producer is not None:
            return
        producer = self._clients.producer(self.transactional_id)
        try:
            async with asyncio.timeout(self.deadline_seconds):
                await producer.start()
        except Exception as error:
            await abandon(producer)
            await diagnose_refusal(self._clients.settings)
            raise FatalError(f"{self.transactional_id}: no producer: {translate(error)}") from error
        self._producer = producer

    async def write(
        self, records: Sequence[ProducerRecord], offsets: Mapping[TopicPartition, Offset] | None = None
    ) -> None:
        """Commit all or nothing. Offsets belong to the group of the same name as the transactional id.

        Raises FencedError where another process has taken the id, FatalError where the commit failed or is unknown.
        """
        async with self._lock:
            if self._producer is None:
                raise FatalError(f"{self.transactional_id}: the writer is closed or failed before")
            try:
                transaction = Transaction(self._producer, self.deadline_seconds, self._failpoints)
                await transaction.run(records, offsets, self.transactional_id)
            except BaseException as error:
                await self.close()
                raise self._explained(error) from error

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, FencedError):
            return FencedError(
                f"another process writes as {self.transactional_id} now, or this one was unreachable for longer than "
                "the transaction timeout; it must not be restarted automatically"
            )
        if isinstance(error, TransactionFailedError):
            return FatalError(
                f"{self.transactional_id}: it is not known what was committed ({error}); start the trainer again "
                "from its checkpoint"
            )
        return error

    async def close(self) -> None:
        """Discard the producer, in bounded time. No transaction is left open: each was awaited."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await abandon(producer)
