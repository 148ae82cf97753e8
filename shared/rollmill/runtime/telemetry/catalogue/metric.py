"""What is known of a metric before anything is measured: name, kind, unit, labels, meaning, who exports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

NAMESPACE = "rollmill_"
QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds in seconds, for what a program waits for."""
SLOW = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
"""Upper bounds in seconds, for the age of rollouts."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Label:
    """A label. ``free``: users choose further values, so only so many are kept apart and the rest is ``other``.

    Without ``values`` and not free: the configuration bounds it (topics, partitions, tasks).
    """

    name: str
    values: tuple[str, ...] = ()
    """Known beforehand: exported as 0 from the start."""
    free: bool = False

    def takes(self, value: str) -> bool:
        return self.free or not self.values or value in self.values


@dataclass(frozen=True)
class Metric:
    """One metric as some components export it; another entry of the same name differs in label values alone."""

    name: str
    """Without namespace and without the ``_total`` of counters."""
    kind: Kind
    help: str
    components: tuple[str, ...]
    labels: tuple[Label, ...] = ()
    unit: str = ""
    """What it counts or measures, in the plural: ``seconds``, ``tokens``, ``records``."""
    family: str | None = None
    """Begins the names of a stage's counts that go here; the rest of the name is the value of the only label."""
    buckets: tuple[float, ...] = QUICK
    meanings: tuple[tuple[str, str], ...] = ()
    """Of the values of its only label, where names alone say too little."""

    @property
    def full_name(self) -> str:
        """As Prometheus knows it; a histogram's series are this with ``_bucket``, ``_sum`` and ``_count``."""
        return f"{NAMESPACE}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def is_guarded(self) -> bool:
        """Whether users can make up values."""
        return any(label.free for label in self.labels)

    def known(self) -> Iterator[dict[str, str]]:
        """Every combination of labels that is known beforehand; none where one of the labels is open."""
        values = [label.values for label in self.labels]
        return (dict(zip(self.label_names, combination, strict=True)) for combination in product(*values))

    def value_in(self, count: str) -> str | None:
        """The label's value in the name of a stage's count; None: the count does not go here."""
        if self.family is None or not count.startswith(self.family):
            return None
        value = count.removeprefix(self.family)
        return value if value and self.labels[0].takes(value) else None
