"""What a task reports of itself: counters of committed transactions, lag, and the gauges of its stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from rollmill.runtime.stream.batch_processor import TransactionBatch
from rollmill.runtime.telemetry.metrics import Metrics

GAUGE_SECONDS = 2.0
"""Time between two looks at the stage's gauges: they may pass over the whole state."""


class TaskMetrics:
    """Of one task, by name; ``prefix``: of the topics."""

    def __init__(self, metrics: Metrics, task: str, prefix: str) -> None:
        self._metrics, self._task, self._prefix = metrics, task, prefix
        self._next_gauges = 0.0

    def failed(self) -> None:
        self._metrics.count("task_failures", task=self._task)

    def restored(self, seconds: float) -> None:
        self._metrics.observe("restore_seconds", seconds)

    def committed(self, batch: TransactionBatch, seconds: float) -> None:
        """A transaction with the contents of ``batch`` was committed."""
        metrics = self._metrics
        metrics.observe("transaction_seconds", seconds)
        metrics.count("transactions")
        for topic, records in batch.inputs.items():
            metrics.count("records", records, topic=topic)
        for topic, records in Counter(record.topic for record in batch.records).items():
            metrics.count("written_records", records, topic=topic.removeprefix(self._prefix))
        metrics.count_all(batch.counts)
        for name, value in batch.observed:
            metrics.observe(name, value)

    def progress(self, lag: Mapping[str, int], state_keys: int, gauges: Callable[[], Mapping[str, float]]) -> None:
        """``lag``: records by slot; ``gauges``: called only where they are due."""
        for slot, records in lag.items():
            topic, _, partition = slot.rpartition("/")
            self._metrics.gauge("lag_records", records, topic=topic, partition=partition)
        self._metrics.gauge("state_keys", state_keys, task=self._task)
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + GAUGE_SECONDS
            for name, value in gauges().items():
                self._metrics.gauge(name, value, task=self._task)
