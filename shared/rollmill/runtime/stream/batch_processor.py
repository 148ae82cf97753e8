"""Turns input records and punctuations into the batch of one transaction, dead letters included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rollmill.errors import FatalError, PoisonRecordError
from rollmill.runtime.claim_check import largest_value
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.changelog import Position
from rollmill.runtime.stream.dead_letters import DeadLetterBudget, bare_dead_letter, dead_letter, refuse_oversized
from rollmill.runtime.stream.processor import InputRecord, Outputs, Processor, TaskContext, TaskLocal
from rollmill.runtime.stream.producer_records import changelog_producer_record, producer_record
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.runtime.stream.task_stop import TaskDecision
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

    def add(self, prepared: PreparedOutputs) -> None:
        self.records += prepared.records
        self.size += prepared.size
        for name, amount in prepared.counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        self.observed += prepared.observed


@dataclass(frozen=True)
class PreparedOutputs:
    """The outputs of one record or punctuation: applied to the state, encoded and measured. Adding them cannot fail."""

    records: list[ProducerRecord]
    size: int
    counts: dict[str, float]
    observed: list[tuple[str, float]]


class BatchProcessor(Generic[V]):
    """Applies a stage to a task's state. What it did since the last `settle` can be rolled back."""

    def __init__(self, stage: Processor[V, Any], identity: TaskIdentity, settings: ServiceSettings) -> None:
        self._stage, self._identity, self._settings = stage, identity, settings
        self.local: TaskLocal = stage.task_local()
        self.state = TaskState.of(stage, self.local)
        self.budget = self._settled = DeadLetterBudget(settings.dead_letter_limit, settings.dead_letter_leak)
        self._quarantined: dict[tuple[str, int], str] = {}
        self._decided: dict[tuple[str, int], PoisonRecordError] = {}
        """Records that an operator has put aside, until the task is past them."""
        self._letters_made: set[tuple[str, int]] = set()
        """Since the last commit: where outputs are refused although one was made, the letter itself was."""

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

    def settle(self, position: Position | None, *, committed: bool) -> None:
        """Keep or undo what was done since the last commit; ``position`` has the dead-letter budget then."""
        if committed:
            self.state.commit()
            self.local.committed(self.state)
            self._letters_made.clear()
        else:
            self.state.rollback()
            self.local.rolled_back(self.state)
        level, keys = (position.dead_letter_level, position.dead_letter_keys) if position else (0.0, ())
        faults = self.budget.faults if committed else self._settled.faults
        self.budget = self._settled = replace(self._settled, level=level, keys=keys, faults=faults)

    def close(self) -> None:
        self.local.close()

    def gauges(self) -> Mapping[str, float]:
        return self._stage.gauges(self.state, self.local)

    def quarantine(self, slot: str, offset: int, error: str) -> None:
        """Make this record a dead letter when it is read again: the broker refused its outputs for good."""
        self._quarantined[slot, offset] = error

    def decide(self, decision: TaskDecision | None) -> None:
        """What an operator has decided about a record; None: nothing."""
        self._decided.clear()
        if decision is None:
            return
        if decision.refusal is None:
            self.budget = replace(self.budget, level=0.0, keys=())
        else:
            self._decided[decision.slot, decision.offset] = decision.refusal

    def process(self, batch: TransactionBatch, record: InputRecord, slot: str, topic_index: int) -> None:
        """Add one record's outputs to ``batch`` and state. Raises FatalError over the dead-letter limit.

        Nothing of a record is applied or added before all of it is: whatever fails in making, measuring or copying its
        outputs makes it a dead letter (rule T6).
        """
        origin = origin_of(topic_index, record.partition, record.offset)
        try:
            prepared = self._guarded(record, lambda: self._outputs(record, slot), origin)
            self.budget = self.budget.after_success()
        except PoisonRecordError as error:
            self.budget = self.budget.after(error, record)
            prepared = self._dead_letter(record, slot, error, origin)
        batch.add(prepared)
        batch.positions[slot] = record.offset + 1
        batch.inputs[record.topic.name] += 1

    def punctuate(self, batch: TransactionBatch, context: TaskContext) -> None:
        """Add a punctuation's outputs to ``batch`` and state."""
        outputs = self._stage.punctuate(self.state, context, self.local)
        if any(not update.replaces for update in outputs.updates):
            raise FatalError(f"{self._stage.name}: a punctuation has no input offset, so its updates must replace")
        try:
            batch.add(self._prepared(outputs, "tick"))
        except PoisonRecordError as error:
            raise FatalError(f"{self._stage.name}: an output of a punctuation cannot be sent: {error}") from error

    def _guarded(self, record: InputRecord, make: Callable[[], Outputs], origin: str) -> PreparedOutputs:
        """The outputs that ``make`` gives, prepared. Raises PoisonRecordError for every error but a fatal one."""
        try:
            return self._prepared(make(), origin)
        except (FatalError, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except PoisonRecordError as error:
            received = len(record.content or b"") if error.reason == "output_too_large" else 0
            if received <= record.topic.max_bytes:
                raise
            raise PoisonRecordError("too_large", f"{received} bytes were received: {error.detail}") from error
        except BaseException as error:  # a bug, or an exit of foreign code: the budget stops a bad deploy
            raise PoisonRecordError("stage_error", repr(error)) from error

    def _outputs(self, record: InputRecord, slot: str) -> Outputs:
        refused = self._quarantined.pop((slot, record.offset), None)
        if refused is not None:
            raise PoisonRecordError("outputs_refused", refused)
        if (decided := self._decided.get((slot, record.offset))) is not None:
            raise decided
        with contained():
            return self._stage.process(self.state, record, self.local)

    def _dead_letter(self, record: InputRecord, slot: str, error: PoisonRecordError, origin: str) -> PreparedOutputs:
        """Of a record; a bare one where the broker has refused the full one, or where that cannot be made."""
        place, stage = (slot, record.offset), self._stage.name
        ways = [
            lambda: refuse_oversized(dead_letter(record, stage, error)),
            lambda: bare_dead_letter(record, stage, error, dispositions=True),
        ]
        is_refused = error.reason == "outputs_refused" and place in self._letters_made
        self._letters_made.add(place)
        for way in ways[is_refused:]:
            with suppress(PoisonRecordError):
                return self._guarded(record, way, origin)
        return self._prepared(bare_dead_letter(record, stage, error, dispositions=False), origin)

    def _prepared(self, outputs: Outputs, origin: str) -> PreparedOutputs:
        """Encode, then apply; where anything fails the state is as before."""
        for update in outputs.updates:
            if len(update.payload) > largest_value(self._stage.state_topic, self._settings):
                raise PoisonRecordError("output_too_large", f"{len(update.payload)} bytes of state for one record")
        records = [producer_record(record, self._settings) for record in outputs.records]
        counts = {name: amount + 0.0 for name, amount in outputs.counts.items()}
        observed = [(name, value + 0.0) for name, values in outputs.observed.items() for value in values]
        savepoint = self.state.savepoint(outputs)
        try:
            changelog = self._identity.changelog
            changes = self.state.stage(outputs, origin)
            records += [changelog_producer_record(change, changelog.topic, changelog.partition) for change in changes]
            return PreparedOutputs(records, sum(record.size for record in records), counts, observed)
        except BaseException:
            self.state.return_to(savepoint)
            raise
