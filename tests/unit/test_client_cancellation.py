"""A client's own cancellation is a failure, and never a wish to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaProducer

from rollmill.errors import RetryableError
from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.kafka.clients import stop_consumer
from rollmill.runtime.kafka.transaction import Transaction, TransactionFailedError, abandon, stop_producer


async def cancelled_inside() -> None:
    """As aiokafka's sender does, when what it waited for was cancelled."""
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner


class CancellingProducer:
    """Like a producer whose broker is away."""

    def __init__(self) -> None:
        self.closed = False
        self._message_accumulator = SimpleNamespace(fail_all=lambda _error: None)
        self._sender = SimpleNamespace(sender_task=None)
        self.client = self._client = self

    async def begin_transaction(self) -> None:
        return None

    async def send(self, *_record: Any, **_options: Any) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.cancel()
        return sent

    async def commit_transaction(self) -> None:
        await cancelled_inside()

    async def stop(self) -> None:
        await cancelled_inside()

    async def close(self) -> None:
        self.closed = True


async def test_a_stray_cancellation_is_an_error_that_passes() -> None:
    with pytest.raises(RetryableError):
        await without_client_cancellation(cancelled_inside())


async def test_a_cancellation_that_somebody_asked_for_goes_through() -> None:
    waiting = asyncio.create_task(without_client_cancellation(asyncio.sleep(60)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_deadline_is_no_stray_cancellation() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await without_client_cancellation(asyncio.sleep(60))


@pytest.mark.parametrize("end", [abandon, stop_producer, stop_consumer])
async def test_a_client_that_cancels_its_own_end_is_thrown_away_all_the_same(end: Any) -> None:
    producer = CancellingProducer()
    await end(producer)
    assert producer.closed


async def test_a_transaction_that_the_client_cancels_has_failed() -> None:
    transaction = Transaction(cast("AIOKafkaProducer", CancellingProducer()), 5.0)
    with pytest.raises(TransactionFailedError):
        await transaction.run([], None, "group")
