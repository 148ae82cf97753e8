"""Counters, gauges and histograms by name, made on first use in a registry of the process's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Metrics of one service; every name gets the prefix ``rollmill_<service>_``.

    The label names of a metric are fixed by its first use.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"rollmill_{service.replace('-', '_')}_"
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        if name not in self._counters:
            self._counters[name] = Counter(self._prefix + name, _words(name), sorted(labels), registry=self.registry)
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(self._prefix + name, _words(name), sorted(labels), registry=self.registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                self._prefix + name, _words(name), sorted(labels), registry=self.registry, buckets=BUCKETS
            )
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."
