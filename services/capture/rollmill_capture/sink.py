"""Where events go: appended to a topic, and acknowledged. The Kafka side is one small adapter."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from aiokafka.errors import KafkaError
from faststream.exceptions import FastStreamException
from faststream.kafka import KafkaBroker

from rollmill.codec import CONTENT_TYPE
from rollmill.errors import RetryableError
from rollmill.settings import KafkaSettings
from rollmill.topics import Topic


class NotAcknowledgedError(RetryableError):
    """The log did not confirm the record in time; it may be there all the same (RULES T5)."""


class EventSink(Protocol):
    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        """Append a record; returns once it is acknowledged. Raises NotAcknowledgedError."""
        ...

    def room(self, size: int) -> AbstractContextManager[None]:
        """Inside, there is a place for one record of ``size`` bytes, whatever becomes of Kafka (RULES S5).

        Raises BackpressureError where there is none.
        """
        ...


class KafkaSink:
    """Appends through the application's broker: acknowledged by all in-sync replicas, or an error in time."""

    def __init__(self, broker: KafkaBroker, settings: KafkaSettings, seconds: float) -> None:
        self._broker = broker
        self._prefix = settings.prefix
        self._seconds = seconds

    def room(self, _size: int) -> AbstractContextManager[None]:
        return nullcontext()

    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        name, headers = topic.full_name(self._prefix), {CONTENT_TYPE: topic.format}
        try:
            async with asyncio.timeout(self._seconds):
                await self._broker.publish(value, name, key=key.encode(), headers=headers)
        except TimeoutError as error:
            raise NotAcknowledgedError(f"{name} did not acknowledge within {self._seconds} s") from error
        except (KafkaError, FastStreamException) as error:
            raise NotAcknowledgedError(f"{name} did not take the record: {error!r}") from error
