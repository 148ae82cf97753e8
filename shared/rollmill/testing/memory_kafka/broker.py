"""The broker: partitions, producers with their epochs, transactions, committed group offsets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiokafka import TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, ProducerFenced

from rollmill.codec import Headers
from rollmill.testing.memory_kafka.log import MemoryTransaction, PartitionLog, TransactionStatus

Offsets = dict[TopicPartition, int]


@dataclass
class _TransactionalId:
    """A transactional id: its newest epoch, and its open transaction."""

    epoch: int = 0
    transaction: MemoryTransaction | None = None
    touched: dict[TopicPartition, None] = field(default_factory=dict)
    offsets: dict[str, Offsets] = field(default_factory=dict)


class MemoryBroker:
    """``limits``: largest value by full topic name, in bytes; a larger one is refused, as by ``max.message.bytes``."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self.logs: defaultdict[TopicPartition, PartitionLog] = defaultdict(PartitionLog)
        self.offsets: defaultdict[str, Offsets] = defaultdict(dict)
        self._owners: defaultdict[str, _TransactionalId] = defaultdict(_TransactionalId)
        self._limits = dict(limits or {})

    def register(self, transactional_id: str) -> int:
        """A producer starts: the previous one with this id is fenced, its open transaction aborted. The new epoch."""
        owner = self._owners[transactional_id]
        self._finish(owner, TransactionStatus.ABORTED)
        owner.epoch += 1
        return owner.epoch

    def append(
        self,
        transactional_id: str,
        epoch: int,
        partition: TopicPartition,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> int:
        """The record's offset. Raises ProducerFenced, MessageSizeTooLargeError."""
        owner = self._current(transactional_id, epoch)
        if len(value or b"") > self._limits.get(partition.topic, 2**30):
            raise MessageSizeTooLargeError
        if owner.transaction is None:
            owner.transaction = MemoryTransaction()
        owner.touched[partition] = None
        return self.logs[partition].append(key, value, headers, owner.transaction)

    def add_offsets(self, transactional_id: str, epoch: int, group: str, offsets: Offsets) -> None:
        """Offsets that the group gets when the transaction commits. Raises ProducerFenced."""
        owner = self._current(transactional_id, epoch)
        owner.offsets.setdefault(group, {}).update(offsets)

    def finish(self, transactional_id: str, epoch: int, status: TransactionStatus) -> None:
        """Commit or abort. Raises ProducerFenced."""
        self._finish(self._current(transactional_id, epoch), status)

    def expire(self, transactional_id: str) -> None:
        """The transaction timeout has passed: an open transaction is aborted, and its producer fenced."""
        if self._owners[transactional_id].transaction is not None:
            self.register(transactional_id)

    def produce(
        self,
        partition: TopicPartition,
        key: bytes,
        value: bytes | None,
        *,
        status: TransactionStatus = TransactionStatus.COMMITTED,
    ) -> None:
        """Append a record of another producer, in a transaction of its own."""
        transaction = MemoryTransaction()
        self.logs[partition].append(key, value, (), transaction)
        transaction.status = status
        self.logs[partition].finish(transaction)

    def _current(self, transactional_id: str, epoch: int) -> _TransactionalId:
        owner = self._owners[transactional_id]
        if owner.epoch != epoch:
            raise ProducerFenced
        return owner

    def _finish(self, owner: _TransactionalId, status: TransactionStatus) -> None:
        if owner.transaction is not None:
            owner.transaction.status = status
            for partition in owner.touched:
                self.logs[partition].finish(owner.transaction)
        if status is TransactionStatus.COMMITTED:
            for group, offsets in owner.offsets.items():
                self.offsets[group].update(offsets)
        owner.transaction = None
        owner.touched, owner.offsets = {}, {}
