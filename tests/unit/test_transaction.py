"""What a transaction makes of the client's errors, and how much it has in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownProducerId,
    for_code,
)

from rollmill.errors import FatalError, FencedError
from rollmill.runtime.kafka import transaction
from rollmill.runtime.kafka.transaction import (
    ProducerRecord,
    Transaction,
    TransactionFailedError,
    refuse_forbidden,
    translate,
)
from rollmill.testing.memory_kafka import MemoryBroker, NetworkLink
from rollmill.testing.memory_kafka.producer import MemoryProducer

OUT = TopicPartition("out", 0)


@pytest.mark.parametrize("error", [ProducerFenced(), for_code(47)()])
def test_who_is_fenced_leaves(error: Exception) -> None:
    assert isinstance(translate(error), FencedError)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MessageSizeTooLargeError(), True),
        (OutOfOrderSequenceNumber(), False),  # of the producer, which is replaced: no record is at fault
        (UnknownProducerId(), False),
        (TopicAuthorizationFailedError(), False),
        (TimeoutError(), False),
        (AssertionError(), False),
    ],
)
def test_only_what_a_record_is_can_condemn_it(error: Exception, *, refused: bool) -> None:
    found = translate(error)
    assert isinstance(found, TransactionFailedError)
    assert found.refused is refused


@pytest.mark.parametrize("error", [TopicAuthorizationFailedError(), TransactionalIdAuthorizationFailed()])
def test_a_missing_right_is_fatal_also_behind_another_error(error: KafkaError) -> None:
    failed = translate(error)
    failed.__cause__ = error
    with pytest.raises(FatalError, match="does not allow"):
        refuse_forbidden(failed)
    refuse_forbidden(TransactionFailedError("something else"))


class Watched(MemoryBroker):
    """Counts what arrives between two looks of the producer."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[int] = []

    def take(self, size: int) -> None:
        self.requests.append(size)


class WatchedProducer(MemoryProducer):
    def _append(self, waiting: Any) -> None:
        super()._append(waiting)
        assert isinstance(self._broker, Watched)
        self._broker.take(sum(len(item.value) for item in waiting))


async def test_a_large_transaction_has_a_bounded_share_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "MAX_UNACKNOWLEDGED", 1000)
    broker = Watched()
    producer = WatchedProducer(broker, NetworkLink(0.001), "owner")
    await producer.start()
    records = [ProducerRecord(OUT.topic, 0, b"", bytes(300)) for _ in range(10)]
    assert await Transaction(producer, 5.0).run(records, None, "group") == list(range(10))
    assert max(broker.requests) <= 1000
    assert sum(broker.requests) == 3000
    assert len(broker.logs[OUT].committed()) == 10


class FencedInTheMiddle(MemoryProducer):
    """As aiokafka: once a send is refused, the next call of `send` finds no transaction."""

    async def send(self, *_arguments: Any, **_fields: Any) -> asyncio.Future[Any]:
        if self._refused:
            raise IllegalOperation("Can't send messages while not in transaction")
        self._refused = True
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        found.set_exception(ProducerFenced())
        return found

    _refused = False


async def test_who_is_fenced_while_it_sends_learns_that_and_no_later_error() -> None:
    producer = FencedInTheMiddle(MemoryBroker(), NetworkLink(0.001), "owner")
    await producer.start()
    with pytest.raises(FencedError):
        await Transaction(producer, 5.0).run([ProducerRecord("out", 0, b"", b"x")] * 3, None, "group")
