"""Whole steps over all partitions of one rank. Lives on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiokafka import TopicPartition

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.trainer.batches.reader import BatchReader
from rollmill.trainer.batches.step_assembly import Expectation, StepAssembler, StepRecords, joined


class MultiPartitionReader:
    """Reads each partition on its own, so that none can crowd out another, and puts their parts together."""

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
        """Waits for the next whole step. Raises what went wrong in reading, after the steps before it."""
        return joined(await asyncio.gather(*(reader.next_step() for reader in self._readers.values())))

    async def close(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))

    def __str__(self) -> str:
        """Where the reading stands, for a person."""
        return "; ".join(
            f"{self._topic}/{number}, position {reader.position}, last seen: {reader.last_seen}"
            for number, reader in self._readers.items()
        )
