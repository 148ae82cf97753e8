"""A processor without Kafka: feed it records, inspect its outputs, check that restore gives the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rollmill.codec import JSON, SAFETENSORS, Headers, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import Record
from rollmill.runtime.stream.processor import InputRecord, OutputRecord, Outputs, Processor, TaskContext, TaskLocal
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import Topic

V = TypeVar("V")


class MemoryTask(Generic[V]):
    """Runs one task of a processor in memory, with the engine's own state and in the engine's order."""

    def __init__(self, stage: Processor[V, Any], *, partition: int = 0) -> None:
        self.stage = stage
        self.partition = partition
        self.local: Any = stage.task_local()
        self.state = TaskState.of(stage, self.local)
        self.changelog: dict[str, bytes] = {}
        self.emitted: list[OutputRecord] = []
        self.dead_letters: list[tuple[InputRecord, PoisonRecordError]] = []
        self.counts: dict[str, float] = {}
        self.metrics = Metrics(stage.name)
        """Raises for a metric that is not in the catalogue."""
        self.positions: dict[str, int] = {}

    def feed(
        self,
        topic: Topic,
        value: Record | bytes | None,
        *,
        key: str = "",
        partition: int | None = None,
        headers: Headers = (),
    ) -> Outputs:
        """Process one record as the engine would; poison goes to ``dead_letters``."""
        number = self.partition if partition is None else partition
        slot = f"{topic.name}/{number}"
        offset = self.positions.get(slot, 0)
        self.positions[slot] = offset + 1
        record = InputRecord(topic, number, offset, key.encode(), as_bytes(topic, value), headers)
        try:
            outputs = self.stage.process(self.state, record, self.local)
        except PoisonRecordError as error:
            self.dead_letters.append((record, error))
            return Outputs()
        self._apply(outputs, origin_of(self.stage.inputs.index(topic), number, offset))
        return outputs

    def punctuate(self, now: float, *, caught_up: bool = True) -> Outputs:
        context = TaskContext(
            now=now, partition=self.partition, positions=dict(self.positions), caught_up=caught_up, keeps_up=caught_up
        )
        outputs = self.stage.punctuate(self.state, context, self.local)
        self._apply(outputs, f"~{sum(self.positions.values()):020d}.{len(self.changelog):06d}")
        return outputs

    def of(self, topic: Topic) -> Sequence[OutputRecord]:
        """Everything emitted to one topic so far."""
        return [record for record in self.emitted if record.topic is topic]

    def restored(self) -> TaskState[V]:
        """The state that a new owner would restore from the changelog."""
        return self._restored(self.stage.task_local())

    def restart(self, stage: Processor[V, Any] | None = None) -> None:
        """Go on as a new owner would, with ``stage`` (None: the same): state from the changelog, an empty local."""
        self.stage = stage or self.stage
        self.local.close()
        self.local = self.stage.task_local()
        self.state = self._restored(self.local)

    def _restored(self, local: TaskLocal) -> TaskState[V]:
        state = TaskState.of(self.stage, local)
        state.restore(self.changelog.items())
        local.committed(state)
        return state

    def _apply(self, outputs: Outputs, origin: str) -> None:
        for update in self.state.stage(outputs, origin):
            if update.payload is None:
                self.changelog.pop(update.key, None)
            else:
                self.changelog[update.key] = update.payload
        self.state.commit()
        self.local.committed(self.state)
        self.emitted += outputs.records
        for name, increment in outputs.counts.items():
            self.counts[name] = self.counts.get(name, 0) + increment
        self.metrics.count_all(outputs.counts)
        for name, values in outputs.observed.items():
            for value in values:
                self.metrics.observe(name, value)


def as_bytes(topic: Topic, value: Record | bytes | None) -> bytes | None:
    """A value as the engine encodes it for ``topic``."""
    if value is None or isinstance(value, bytes):
        return value
    return encode(value, topic.format if topic.format in (JSON, SAFETENSORS) else "application/msgpack")
