"""The place that makes clients, for one process on a broker in memory."""

from __future__ import annotations

from typing import Any

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.consumer import MemoryConsumer
from rollmill.testing.memory_kafka.network_link import NetworkLink
from rollmill.testing.memory_kafka.producer import MemoryProducer


class MemoryKafkaClients(KafkaClients):
    """What a process is given in the place of `KafkaClients`."""

    def __init__(self, settings: KafkaSettings, broker: MemoryBroker, line: NetworkLink) -> None:
        super().__init__(settings)
        self._broker, self._line = broker, line

    def producer(self, transactional_id: str | None = None, *, linger_ms: int = 0) -> Any:  # noqa: ARG002
        if transactional_id is None:
            raise ValueError("the broker in memory knows transactional producers only")
        return MemoryProducer(self._broker, self._line, transactional_id)

    def consumer(self, *, group_id: str | None = None, reset: str = "none") -> Any:  # noqa: ARG002  # positions are set
        return MemoryConsumer(self._broker, self._line, group_id)
