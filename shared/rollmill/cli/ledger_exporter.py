"""``rollmill ledger --metrics-port``: the balance for Prometheus. Each outcome is read once."""

from __future__ import annotations

import asyncio
import signal
import time

import structlog
from aiokafka.errors import KafkaError

from rollmill.ops.ledger import LedgerReader
from rollmill.ops.ledger.metrics import show
from rollmill.runtime.telemetry.health import Health, HealthServer
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import KafkaSettings

NAME = "ledger"


async def export(settings: KafkaSettings, host: str, port: int, pause: float) -> None:
    """Look every ``pause`` seconds until SIGTERM or Ctrl-C; ready once the log has been read for the first time.

    /live, /ready and /metrics are served on ``host`` and ``port``. While Kafka is away the last balance stays, the
    time at which it was read shows its age, and what was read before is not read again.
    """
    metrics, health = Metrics(NAME, settings.prefix, strict=False), Health()
    health.expect(NAME)
    server = HealthServer(health, metrics, host, port)
    server.start()
    looking = asyncio.create_task(_look(LedgerReader(settings), metrics, health, pause))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, looking.cancel)
    try:
        await asyncio.wait([looking])
    finally:
        looking.cancel()
        server.stop()
    if not looking.cancelled():
        looking.result()


async def _look(reader: LedgerReader, metrics: Metrics, health: Health, pause: float) -> None:
    while True:
        began = time.monotonic()
        try:
            balance = await reader.look()
        except (KafkaError, OSError, TimeoutError) as error:
            structlog.get_logger().warning("the ledger was not read", error=str(error), kind=type(error).__name__)
            health.ready(NAME, ready=False)
        else:
            show(balance, metrics, at=time.time(), seconds=time.monotonic() - began)
            health.ready(NAME)
        await asyncio.sleep(pause)
