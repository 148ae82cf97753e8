"""The one place that makes Kafka clients, with safe settings in place of risky defaults.

aiokafka and FastStream default to at-most-once acknowledgement, ``latest``, ``read_uncommitted``, auto-created
topics and one-megabyte fetches; nothing else in the tree constructs a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.kafka.security import broker_security, client_security
from rollmill.settings import KafkaSettings

if TYPE_CHECKING:
    from faststream.kafka import KafkaBroker

MAX_REQUEST = 11 * 2**20
"""A dead letter of 9 MiB with headers fits; the topic's own limit is the tighter one."""
MAX_BATCH = 2**20
FETCH = 12 * 2**20
STOP_SECONDS = 5.0


class KafkaClients:
    """Constructs clients of one cluster. The caller starts and stops them."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self._security = client_security(settings)

    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.settings.bootstrap_servers,
            "request_timeout_ms": self.settings.request_timeout_ms,
            **self._security,
        }

    def producer(self, transactional_id: str | None = None, *, linger_ms: int = 2) -> AIOKafkaProducer:
        """Idempotent, acks from all replicas, lz4; transactional with an id.

        ``linger_ms``: 0 where the caller waits for each record.
        """
        return AIOKafkaProducer(
            **self._common(),
            transactional_id=transactional_id,
            transaction_timeout_ms=self.settings.transaction_timeout_ms,
            enable_idempotence=True,
            acks="all",
            linger_ms=linger_ms,
            max_batch_size=MAX_BATCH,
            max_request_size=MAX_REQUEST,
            compression_type="lz4",
        )

    def consumer(self, *, group_id: str | None = None, reset: str = "none") -> AIOKafkaConsumer:
        """Reads committed records only, commits nothing by itself, assigned or subscribed by the caller.

        ``reset``: ``none`` raises where the position is outside the log (rule C3), ``earliest`` reads all of it.
        """
        return AIOKafkaConsumer(
            **self._common(),
            group_id=group_id,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset=reset,
            fetch_max_bytes=4 * FETCH,
            max_partition_fetch_bytes=FETCH,
            fetch_max_wait_ms=100,
            session_timeout_ms=self.settings.session_timeout_ms,
            heartbeat_interval_ms=self.settings.session_timeout_ms // 5,
            max_poll_interval_ms=600_000,
        )

    @asynccontextmanager
    async def reading(self, *, group_id: str | None = None, reset: str = "none") -> AsyncIterator[AIOKafkaConsumer]:
        """A started `consumer`, stopped at the end whatever aiokafka cancels meanwhile."""
        consumer = self.consumer(group_id=group_id, reset=reset)
        try:
            await consumer.start()
            yield consumer
        finally:
            await stop_consumer(consumer)

    def admin(self) -> AIOKafkaAdminClient:
        return AIOKafkaAdminClient(**self._common())


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Bounded (rule T5): a consumer that cannot leave its group in time is abandoned."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await without_client_cancellation(consumer.stop())
    except Exception:  # noqa: BLE001  # whatever it is, this consumer is not used any more
        with suppress(Exception):
            async with asyncio.timeout(STOP_SECONDS):
                await without_client_cancellation(consumer._client.close())  # noqa: SLF001  # no public way


def faststream_broker(settings: KafkaSettings) -> KafkaBroker:
    """FastStream's broker for the at-least-once edges: no topic is created, every publish is acknowledged by all."""
    from faststream.kafka import KafkaBroker  # noqa: PLC0415  # only services have FastStream

    return KafkaBroker(
        settings.bootstrap_servers,
        security=broker_security(settings),
        acks="all",
        enable_idempotence=True,
        compression_type="lz4",
        max_request_size=MAX_REQUEST,
        max_batch_size=MAX_BATCH,
        linger_ms=2,
        request_timeout_ms=settings.request_timeout_ms,
        allow_auto_create_topics=False,
        logger=None,
    )
