"""``rollmill ledger --metrics-port``: the balance as metrics for Prometheus. Each outcome is read once."""

from __future__ import annotations

import asyncio
import signal
import time

import structlog
from aiokafka.errors import KafkaError

from rollmill.ops.ledger import Balance, LedgerReader, Totals
from rollmill.runtime.telemetry.health import Health, HealthServer
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import KafkaSettings

NAME = "ledger"


async def export(settings: KafkaSettings, host: str, port: int, pause: float) -> None:
    """Look every ``pause`` seconds until SIGTERM or Ctrl-C; ready once the log has been read for the first time.

    /live, /ready and /metrics are served on ``host`` and ``port``. While Kafka is unreachable the last balance stays,
    the time at which it was read shows its age, and what was read before is not read again.
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
            structlog.get_logger().warning(
                "the ledger was not read; the last balance stays, next try after the pause",
                error=str(error),
                kind=type(error).__name__,
            )
            health.ready(NAME, ready=False)
        else:
            export_balance(balance, metrics, at=time.time(), seconds=time.monotonic() - began)
            health.ready(NAME)
        await asyncio.sleep(pause)


def export_balance(balance: Balance, metrics: Metrics, *, at: float, seconds: float) -> None:
    """Set the ledger's gauges. ``at``: when it was read, since the epoch; ``seconds``: how long that took."""
    total = balance.total
    metrics.gauge("ledger_captured_tokens", total.captured)
    for fate, tokens in fates(total).items():
        metrics.gauge("ledger_tokens", tokens, fate=fate)
    _by_reason(metrics, "ledger_excluded_tokens", total.excluded)
    _by_reason(metrics, "ledger_dead_lettered_tokens", total.dead_lettered)
    for kind in ("lost", "doubled", "uncaptured"):
        metrics.gauge("ledger_imbalance_tokens", getattr(total, kind), kind=kind)
    metrics.gauge("ledger_unreadable_records", balance.unreadable)
    metrics.gauge("ledger_uncounted_records", balance.uncounted)
    since = balance.pending_since
    metrics.gauge("ledger_oldest_pending_seconds", 0.0 if since is None else max(0.0, at - since))
    _by_length(metrics, balance)
    metrics.gauge("ledger_looked_timestamp_seconds", at)
    metrics.observe("ledger_look_seconds", seconds)


def fates(totals: Totals) -> dict[str, int]:
    """Captured tokens by what became of them; with those that are lost, all of them."""
    excluded, dead = totals.excluded.total(), totals.dead_lettered.total()
    return {"trained": totals.trained, "excluded": excluded, "dead_lettered": dead, "pending": totals.pending}


def _by_reason(metrics: Metrics, name: str, reasons: dict[str, int]) -> None:
    """A rewind takes outcomes back, so a reason can disappear."""
    metrics.clear(name)
    for reason, tokens in reasons.items():
        metrics.gauge(name, tokens, reason=reason)


def _by_length(metrics: Metrics, balance: Balance) -> None:
    metrics.clear("ledger_length_tokens")
    for length, totals in balance.by_length.items():
        for fate, tokens in fates(totals).items():
            metrics.gauge("ledger_length_tokens", tokens, length=length, fate=fate)
