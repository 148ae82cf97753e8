"""Turns input records and punctuations into the batch of one transaction, dead letters included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollmill.errors import FatalError, PoisonRecordError
from rollmill.runtime.claim_check import largest_value
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.dead_letters import DeadLetterBudget, dead_letter
from rollmill.runtime.stream.processor import InputRecord, Outputs, Processor, TaskContext, TaskLocal
from rollmill.runtime.stream.producer_records import changelog_producer_record, producer_record
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.settings import ServiceSettings
from rollmill.strategies.foreign_code import contained

V = TypeVar("V")

YIELD_SECONDS = 0.010
"""Longest run of processing without giving the event loop a turn (rule C5)."""


@dataclass
class TransactionBatch:
    """What one transaction will write, and what is counted once it is committed."""

    records: list[ProducerRecord] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    observed: list[tuple[str, float]] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    inputs: Counter[str] = field(default_factory=Counter)
    """Input records processed, by topic."""
    size: int = 0
    """Bytes of ``records``, kept up to date: it is read after each input."""

    def add(self, records: Sequence[ProducerRecord]) -> None:
        self.records += records
        self.size += sum(record.size for record in records)

    def measure(self, outputs: Outputs) -> None:
        for name, amount in outputs.counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        self.observed += [(name, value) for name, values in outputs.observed.items() for value in values]


class BatchProcessor(Generic[V]):
    """Applies a stage to a task's state. What it did since the last `settle` can be rolled back."""

    def __init__(self, stage: Processor[V, Any], identity: TaskIdentity, settings: ServiceSettings) -> None:
        self._stage, self._identity, self._settings = stage, identity, settings
        self.local: TaskLocal = stage.task_local()
        self.state = TaskState.of(stage, self.local)
        self.budget = self._fresh_budget(0.0)
        self._quarantined: dict[tuple[str, int], str] = {}

    async def restore(self, live: dict[bytes, bytes]) -> None:
        """Fold the live changelog records, which are used up; the event loop gets its turns (rule C5)."""
        self.local.close()
        self.local = self._stage.task_local()
        self.state = TaskState.of(self._stage, self.local)
        now = asyncio.get_running_loop().time
        until = now() + YIELD_SECONDS
        for _ in self.state.restoring(live):
            if now() > until:
                await asyncio.sleep(0)
                until = now() + YIELD_SECONDS

    def settle(self, level: float, *, committed: bool) -> None:
        """Keep or undo what was done since the last commit; ``level`` is the dead-letter level then."""
        if committed:
            self.state.commit()
            self.local.committed(self.state)
        else:
            self.state.rollback()
            self.local.rolled_back(self.state)
        self.budget = self._fresh_budget(level)

    def close(self) -> None:
        self.local.close()

    def gauges(self) -> Mapping[str, float]:
        return self._stage.gauges(self.state, self.local)

    def quarantine(self, slot: str, offset: int, error: str) -> None:
        """Make this record a dead letter when it is read again: the broker refused its outputs for good."""
        self._quarantined[slot, offset] = error

    def process(self, batch: TransactionBatch, record: InputRecord, slot: str, topic_index: int) -> None:
        """Add one record's outputs to ``batch`` and state. Raises FatalError over the dead-letter limit."""
        origin = origin_of(topic_index, record.partition, record.offset)
        poison: PoisonRecordError | None = None
        try:
            outputs = self._outputs(record, slot)
            encoded = self._encode(outputs)
        except PoisonRecordError as error:
            poison = error
            outputs = dead_letter(record, self._stage.name, error)
            encoded = self._encode(outputs)
        self.budget = self.budget.after(dead=poison is not None)
        self._add(batch, outputs, encoded, origin)
        batch.positions[slot] = record.offset + 1
        batch.inputs[record.topic.name] += 1

    def punctuate(self, batch: TransactionBatch, context: TaskContext) -> None:
        """Add a punctuation's outputs to ``batch`` and state."""
        outputs = self._stage.punctuate(self.state, context, self.local)
        if any(not update.replaces for update in outputs.updates):
            raise FatalError(f"{self._stage.name}: a punctuation has no input offset, so its updates must replace")
        try:
            self._add(batch, outputs, self._encode(outputs), "tick")
        except PoisonRecordError as error:
            raise FatalError(f"{self._stage.name}: an output of a punctuation cannot be sent: {error}") from error

    def _outputs(self, record: InputRecord, slot: str) -> Outputs:
        refused = self._quarantined.pop((slot, record.offset), None)
        if refused is not None:
            raise PoisonRecordError("outputs_refused", refused)
        try:
            with contained():
                return self._stage.process(self.state, record, self.local)
        except (PoisonRecordError, FatalError):
            raise
        except Exception as error:  # a bug: the record becomes a dead letter, and the budget stops a bad deploy
            raise PoisonRecordError("stage_error", repr(error)) from error

    def _encode(self, outputs: Outputs) -> list[ProducerRecord]:
        for update in outputs.updates:
            if len(update.payload) > largest_value(self._stage.state_topic, self._settings):
                raise PoisonRecordError("output_too_large", f"{len(update.payload)} bytes of state for one record")
        return [producer_record(record, self._settings) for record in outputs.records]

    def _add(self, batch: TransactionBatch, outputs: Outputs, encoded: Sequence[ProducerRecord], origin: str) -> None:
        changelog = self._identity.changelog
        changes = self.state.stage(outputs, origin)
        batch.add(encoded)
        batch.add([changelog_producer_record(change, changelog.topic, changelog.partition) for change in changes])
        batch.measure(outputs)

    def _fresh_budget(self, level: float) -> DeadLetterBudget:
        return DeadLetterBudget(self._settings.dead_letter_limit, self._settings.dead_letter_leak, level)
