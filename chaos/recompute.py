"""Computes every batch again from the topic ``cuts``: equal topics and cuts must give equal bytes (rule B2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from chaos.stack import Stack
from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import Cut
from rollmill.runtime.kafka.log_reader import KafkaRecord, Log
from rollmill.runtime.stream import InputRecord, Outputs
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.topics import BATCHES, CUTS, Topic
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import progress_of, waiting_groups
from rollmill_batcher.steps.cut import cut_outputs
from rollmill_batcher.steps.cut_planning import plan_cut

Bytes = dict[tuple[int, bytes], bytes]
"""Batches by partition and key."""


@dataclass
class Recomputing:
    """Builds the batcher's state again: of each cut the intake first, then the cut itself (rule B2).

    A return of steps is no cut: the cuts of the steps decide what they train, and the request, which is in ``acks``
    like all input, names the number of ranks. So it is processed as part of the intake.
    """

    config: BatcherConfig
    waiting: dict[str, list[InputRecord]]
    """Input by ``topic/partition``, in order."""
    found: Bytes = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stage = BatcherStage(self.config)
        self._local = self._stage.task_local()
        self._state = TaskState.of(self._stage, self._local)

    def cut(self, cut: Cut) -> None:
        self._take_in(cut.positions)
        bare = cut.replace(batch_id=None, groups=(), excluded={})
        plan = plan_cut(
            waiting_groups(self._state), progress_of(self._state), bare, self.config, self._local.evaluations
        )
        outputs = cut_outputs(self._state, bare, plan, self.config)
        for record in outputs.records:
            if record.topic is CUTS and record.value != cut:
                self.differing.append(f"cut {cut.sequence}: decided otherwise")
        self._apply(outputs, f"~{cut.sequence:020d}")

    def rest(self) -> None:
        """Processes the records after the last cut."""
        self._take_in({slot: records[-1].offset + 1 for slot, records in self.waiting.items() if records})

    def _apply(self, outputs: Outputs, origin: str) -> None:
        for record in outputs.records:
            if record.topic is BATCHES and isinstance(record.value, bytes):
                self.found[record.partition or 0, record.key.encode()] = record.value
        self._state.stage(outputs, origin)
        self._state.commit()
        self._local.committed(self._state)

    def _take_in(self, positions: Mapping[str, int]) -> None:
        for slot, offset in positions.items():
            records = self.waiting.get(slot, [])
            while records and records[0].offset < offset:
                self._process(records.pop(0))

    def _process(self, record: InputRecord) -> None:
        try:
            outputs = self._stage.process(self._state, record, self._local)
        except PoisonRecordError:
            return  # the engine wrote a dead letter
        index = self._stage.inputs.index(record.topic)
        self._apply(outputs, origin_of(index, record.partition, record.offset))


async def recompute(stack: Stack) -> tuple[int, list[str]]:
    """The number of batches in the log, and a line for each difference."""
    settings = BatcherSettings(**_options(stack.programs["batcher"].env))
    async with Log.open(stack.settings) as log:
        cuts = [decode(Cut, record.value, tuple(record.headers)) async for record in log.read(CUTS)]
        batches = {(r.partition, r.key or b""): r.value or b"" async for r in log.read(BATCHES)}
        waiting: dict[str, list[InputRecord]] = {}
        for topic in BatcherStage.inputs:
            async for record in log.read(topic):
                waiting.setdefault(f"{topic.name}/{record.partition}", []).append(_input(topic, record))
    work = Recomputing(settings.batcher_config(), waiting)
    for cut in sorted(cuts, key=lambda cut: cut.sequence):
        work.cut(cut)
    work.rest()
    return len(batches), [*work.differing, *_compared(batches, work.found)]


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the service was started with; objects and lists are JSON in the environment."""
    return {name.removeprefix("ROLLMILL_").lower(): _value(text) for name, text in environment.items()}


def _value(text: str) -> Any:
    return orjson.loads(text) if text.startswith(("{", "[")) else None if text == "none" else text


def _input(topic: Topic, record: KafkaRecord) -> InputRecord:
    return InputRecord(topic, record.partition, record.offset, record.key or b"", record.value, tuple(record.headers))


def _compared(logged: Bytes, found: Bytes) -> list[str]:
    names = sorted(logged.keys() | found.keys())
    return [
        f"batch {key.decode()} of rank {rank} differs"
        for rank, key in names
        if logged.get((rank, key)) != found.get((rank, key))
    ]
