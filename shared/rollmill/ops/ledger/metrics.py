"""The ledger as metrics, for a program that looks again and again."""

from __future__ import annotations

from rollmill.ops.ledger.balance import Balance, Totals
from rollmill.runtime.telemetry.metrics import Metrics


def show(balance: Balance, metrics: Metrics, *, at: float, seconds: float) -> None:
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
    _by_length(metrics, balance)
    metrics.gauge("ledger_looked_timestamp_seconds", at)
    metrics.observe("ledger_look_seconds", seconds)


def fates(totals: Totals) -> dict[str, int]:
    """Captured tokens by what became of them; with those that are lost, all of them."""
    excluded, dead = totals.excluded.total(), totals.dead_lettered.total()
    return {"trained": totals.trained, "excluded": excluded, "dead_lettered": dead, "pending": totals.pending}


def _by_reason(metrics: Metrics, name: str, reasons: dict[str, int]) -> None:
    """A rewind takes words back, so a reason can be gone."""
    metrics.clear(name)
    for reason, tokens in reasons.items():
        metrics.gauge(name, tokens, reason=reason)


def _by_length(metrics: Metrics, balance: Balance) -> None:
    metrics.clear("ledger_length_tokens")
    for length, totals in balance.by_length.items():
        for fate, tokens in fates(totals).items():
            metrics.gauge("ledger_length_tokens", tokens, length=length, fate=fate)
