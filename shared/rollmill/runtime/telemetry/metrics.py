"""The metrics of one process: those of the catalogue, from the start, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from rollmill.errors import RollmillError
from rollmill.runtime.telemetry.catalogue import COMPONENT, NAMESPACE, PREFIX, Kind, Metric, metrics_of

MOST_SERIES = 200
"""Of a metric with label values from users; further values are counted as ``other``."""
OTHER = "other"
UNDECLARED = "undeclared_metrics"


class UndeclaredMetricError(RollmillError):
    """The catalogue has no metric of this name and kind with these labels."""


class Metrics:
    """Metrics of one component (a service, or the ledger), all at 0 from the start where their labels are known.

    ``prefix``: of the topics; every series carries it. ``strict``: what the catalogue does not know raises
    UndeclaredMetricError; else it is logged once and counted, for a measurement must not stop a service.
    """

    def __init__(self, component: str, prefix: str = "", *, strict: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._exported = CollectorRegistry()
        self._exported.register(_Labelled(self.registry, {COMPONENT: component, PREFIX: prefix}))
        self._strict = strict
        self._complained: set[str] = set()
        self._known = {name: _Known(metric, self.registry) for name, metric in metrics_of(component).items()}

    def begin(self, name: str, **labels: str) -> None:
        """Export a series as 0 from now on, where the process knows a label's value before it measures anything.

        A rate shows nothing of what was counted before the first scrape of a series.
        """
        self._known[name].series(labels)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._measure(Kind.COUNTER, name, amount, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._measure(Kind.GAUGE, name, value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._measure(Kind.HISTOGRAM, name, value, labels)

    def count_all(self, counts: Mapping[str, float]) -> None:
        """The counts of a stage, each by the metric of its name, or by the family that its name begins with."""
        for name, amount in counts.items():
            metric, labels = self._place(name)
            self._measure(Kind.COUNTER, metric, amount, labels)

    def clear(self, name: str) -> None:
        """Forget a gauge's series: those that are set next are all that there are."""
        self._known[name].clear()

    def forget(self, name: str, **labels: str) -> None:
        """Forget one series of a gauge: another process exports it now."""
        self._known[name].forget(labels)

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self._exported)

    def _place(self, count: str) -> tuple[str, dict[str, str]]:
        if count in self._known:
            return count, {}
        found = [(known.metric, known.metric.value_in(count)) for known in self._known.values()]
        fitting = [(metric, value) for metric, value in found if value is not None]
        if not fitting:
            return count, {}
        metric, value = max(fitting, key=lambda pair: len(pair[0].family or ""))
        return metric.name, {metric.labels[0].name: value}

    def _measure(self, kind: Kind, name: str, value: float, labels: dict[str, str]) -> None:
        known = self._known.get(name)
        series = known.series(labels) if known is not None and known.metric.kind is kind else None
        if series is None:
            self._complain(f"{kind.value} {name}{sorted(labels.items()) if labels else ''}", name)
        else:
            series.take(value)

    def _complain(self, what: str, name: str) -> None:
        if self._strict:
            raise UndeclaredMetricError(f"the catalogue of metrics has no {what}")
        self.count(UNDECLARED)
        if name not in self._complained:
            self._complained.add(name)
            structlog.get_logger().error("the catalogue of metrics lacks a metric", metric=what)


class _Series(Protocol):
    def take(self, value: float) -> None: ...


@dataclass(frozen=True)
class _Counted:
    of: Counter

    def take(self, value: float) -> None:
        self.of.inc(value)


@dataclass(frozen=True)
class _Set:
    of: Gauge

    def take(self, value: float) -> None:
        self.of.set(value)


@dataclass(frozen=True)
class _Observed:
    of: Histogram

    def take(self, value: float) -> None:
        self.of.observe(value)


@dataclass
class _Known:
    """A metric of the catalogue, its collector, and the series that it has so far."""

    metric: Metric
    registry: CollectorRegistry
    _collector: Counter | Gauge | Histogram = field(init=False)
    _names: dict[str, None] = field(init=False)
    """Of its labels, in order: a metric is measured more often than a new series begins."""
    _series: dict[tuple[str, ...], _Series] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._collector = _collector(self.metric, self.registry)
        self._names = dict.fromkeys(self.metric.label_names)
        for labels in self.metric.known():
            self.series(labels)

    def series(self, labels: Mapping[str, str]) -> _Series | None:
        """The series with these labels; None where the metric does not declare them."""
        if labels.keys() != self._names.keys():
            return None
        values = tuple(labels[name] for name in self._names)
        return self._series.get(values) or self._new_series(values)

    def _new_series(self, values: tuple[str, ...]) -> _Series | None:
        declared = self.metric.labels
        if not all(label.takes(value) for label, value in zip(declared, values, strict=True)):
            return None
        if self.metric.is_guarded and len(self._series) >= MOST_SERIES:
            values = tuple(OTHER if label.free else v for label, v in zip(declared, values, strict=True))
        found = self._series.get(values)
        if found is None:
            child = self._collector.labels(*values) if values else self._collector
            found = self._series[values] = _series(child)
        return found

    def forget(self, labels: Mapping[str, str]) -> None:
        values = tuple(labels[name] for name in self.metric.label_names)
        if self._series.pop(values, None) is not None:
            self._collector.remove(*values)

    def clear(self) -> None:
        self._series.clear()
        self._collector.clear()
        for labels in self.metric.known():
            self.series(labels)


def _series(child: Counter | Gauge | Histogram) -> _Series:
    if isinstance(child, Counter):
        return _Counted(child)
    return _Set(child) if isinstance(child, Gauge) else _Observed(child)


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = NAMESPACE + metric.name
    if metric.kind is Kind.COUNTER:
        return Counter(name, metric.help, metric.label_names, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(name, metric.help, metric.label_names, registry=registry)
    return Histogram(name, metric.help, metric.label_names, registry=registry, buckets=metric.buckets)


@dataclass(frozen=True, eq=False)
class _Labelled(Collector):
    """A registry seen with labels that all its series share, and without the times at which they were made."""

    registry: CollectorRegistry
    labels: Mapping[str, str]

    def collect(self) -> Iterator[Family]:
        for family in self.registry.collect():
            seen = Family(family.name, family.documentation, family.type)
            kept = (sample for sample in family.samples if not sample.name.endswith("_created"))
            seen.samples = [self._with_labels(sample) for sample in kept]
            yield seen

    def _with_labels(self, sample: Sample) -> Sample:
        return sample._replace(labels={**self.labels, **sample.labels})
