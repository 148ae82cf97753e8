"""Whole steps of one rank, read ahead of the trainer by a bounded number. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from rollmill.errors import FatalError, PoisonRecordError, RollmillError
from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.kafka.clients import KafkaClients, stop_consumer
from rollmill.trainer.batches.step_assembly import Expectation, StepAssembler, StepRecords, join_partitions
from rollmill.trainer.layouts.safetensors_reader import read_batch

POLL_MS = 200


class BatchReader:
    """Reads one partition of ``batches`` from an explicit position, committed records only."""

    def __init__(
        self, clients: KafkaClients, partition: TopicPartition, assembler: StepAssembler, prefetch_steps: int
    ) -> None:
        self._consumer: AIOKafkaConsumer = clients.consumer()
        self._partition = partition
        self._assembler = assembler
        self._ready: asyncio.Queue[StepRecords | Exception] = asyncio.Queue(prefetch_steps)
        self._reading: asyncio.Task[None] | None = None
        self.last_seen = "none"
        self.position: int | None = None

    async def start(self, offset: int) -> None:
        """Read from ``offset`` on. Raises aiokafka's errors where the broker cannot be reached."""
        try:
            await self._consumer.start()
        except BaseException:
            await self.close()
            raise
        self._consumer.assign([self._partition])
        self._consumer.seek(self._partition, offset)
        self.position = offset
        self._reading = asyncio.create_task(self._read_on())

    async def next_step(self) -> StepRecords:
        """Waits for the next whole step. Raises the error of reading, after the steps before it."""
        found = await self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        await stop_consumer(self._consumer)

    async def _read_on(self) -> None:
        try:
            while True:
                polled = await without_client_cancellation(self._consumer.getmany(timeout_ms=POLL_MS))
                await self._take(record for records in polled.values() for record in records)
        except Exception as error:  # noqa: BLE001  # raised in the trainer's thread, whatever it is
            await self._ready.put(self._as_fatal(error))

    async def _take(self, records: Iterable[ConsumerRecord[Any, bytes]]) -> None:
        for record in records:
            step = self._assembler.feed(record.offset, read_batch(record.value or b""))
            self.position = record.offset + 1
            self.last_seen = f"step {self._assembler.next_step - (step is not None)} at offset {record.offset}"
            if step is not None:
                await self._ready.put(step)

    def _as_fatal(self, error: Exception) -> Exception:
        where = f"{self._partition.topic}/{self._partition.partition} offset {self.position}"
        if isinstance(error, OffsetOutOfRangeError):
            return FatalError(f"{where} is outside the log: its batches were deleted before they were trained")
        if isinstance(error, PoisonRecordError):
            return FatalError(f"{where} is no readable batch: {error}")
        if isinstance(error, KafkaError):
            return FatalError(f"{where} cannot be read: {type(error).__name__}: {error}")
        return error if isinstance(error, RollmillError) else FatalError(f"{where}: {type(error).__name__}: {error}")


class MultiPartitionReader:
    """Reads each partition of a rank separately, so that none delays another, and joins the parts of each step."""

    def __init__(
        self, clients: KafkaClients, topic: str, expectations: Mapping[int, Expectation], next_step: int, prefetch: int
    ) -> None:
        self._readers = {
            number: BatchReader(clients, TopicPartition(topic, number), StepAssembler(expected, next_step), prefetch)
            for number, expected in expectations.items()
        }
        self._topic = topic

    async def start(self, offsets: Mapping[int, int]) -> None:
        """Read from the offsets on. Raises aiokafka's errors where the broker cannot be reached."""
        try:
            for number, reader in self._readers.items():
                await reader.start(offsets[number])
        except BaseException:
            await self.close()
            raise

    async def next_step(self) -> StepRecords:
        """Waits for the next whole step. Raises the error of reading, after the steps before it."""
        return join_partitions(await asyncio.gather(*(reader.next_step() for reader in self._readers.values())))

    async def close(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))

    def __str__(self) -> str:
        """The position in each partition, as text for a message."""
        return "; ".join(
            f"{self._topic}/{number}, position {reader.position}, last seen: {reader.last_seen}"
            for number, reader in self._readers.items()
        )
