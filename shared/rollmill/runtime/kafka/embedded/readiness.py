"""When a broker may be used: its metadata and both coordinators answer. An open port does not show that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

PROBE_NAME = "rollmill.readiness"
RETRY_SECONDS = 0.05
REQUEST_TIMEOUT_MS = 5_000
ANSWER_SECONDS = 10.0


async def wait_until_ready(host: str, port: int, *, alive: Callable[[], bool]) -> bool:
    """Wait for the broker to answer; False as soon as ``alive`` returns False.

    The caller bounds the time. Both coordinators' topics exist afterwards, so no client waits for them again.
    """
    while alive():
        if await _listens(host, port) and await _answers(f"{host}:{port}"):
            return True
        await asyncio.sleep(RETRY_SECONDS)
    return False


async def _listens(host: str, port: int) -> bool:
    # Tried first because aiokafka logs an error for every refused connection.
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(address: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):  # otherwise a broker that ends meanwhile would be waited for
            await _find_group_coordinator(address)
            await _get_producer_epoch(address)
    except (KafkaError, OSError):
        return False
    return True


async def _find_group_coordinator(address: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address, request_timeout_ms=REQUEST_TIMEOUT_MS)
    try:
        await admin.start()
        await admin.find_coordinator(PROBE_NAME)
    finally:
        await admin.close()


async def _get_producer_epoch(address: str) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=address, transactional_id=PROBE_NAME, request_timeout_ms=REQUEST_TIMEOUT_MS
    )
    try:
        await producer.start()  # returns once the transaction coordinator has given it an epoch
    finally:
        await producer.stop()
