"""The client factory of one process on a broker in memory."""

from __future__ import annotations

from typing import Any

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.testing.memory_kafka.broker import MemoryBroker
from rollmill.testing.memory_kafka.consumer import MemoryConsumer
from rollmill.testing.memory_kafka.network_link import NetworkLink
from rollmill.testing.memory_kafka.producer import MemoryProducer


class MemoryKafkaClients(KafkaClients):
    """Replaces `KafkaClients` in a process under test."""

    def __init__(self, settings: KafkaSettings, broker: MemoryBroker, link: NetworkLink) -> None:
        super().__init__(settings)
        self._broker, self._link = broker, link

    def producer(self, transactional_id: str | None = None, *, linger_ms: int = 0) -> Any:  # noqa: ARG002
        if transactional_id is None:
            raise ValueError("the broker in memory has transactional producers only")
        return MemoryProducer(self._broker, self._link, transactional_id)

    def consumer(self, *, group_id: str | None = None, reset: str = "none") -> Any:  # noqa: ARG002  # positions are set
        return MemoryConsumer(self._broker, self._link, group_id)
