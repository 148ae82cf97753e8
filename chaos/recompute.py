"""Every batch once more, from the topic ``cuts``: the same topics and cuts must give the same bytes (rule B2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.stack import Stack
from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import Cut
from rollmill.ops.ledger.log_reader import KafkaRecord, Log
from rollmill.runtime.stream import InputRecord, Outputs
from rollmill.runtime.stream.state import TaskState, origin_of
from rollmill.topics import BATCHES, CUTS, Topic
from rollmill_batcher.groups.config import BatcherConfig
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.state import groups, progress_of
from rollmill_batcher.steps.cut import effects_of
from rollmill_batcher.steps.cut_planning import decide

Bytes = dict[tuple[int, bytes], bytes]
"""Batches by partition and key."""


@dataclass
class Recomputing:
    """The batcher's state, folded again; intake first, then the cut (rule B2).

    A return of steps is no decision of a cut: their own cuts decide what they train, and the request, which lies in
    ``acks`` like all input, says for how many ranks. So it is met on the way.
    """

    rules: BatcherConfig
    waiting: dict[str, list[InputRecord]]
    """Input by ``topic/partition``, in order."""
    found: Bytes = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stage = BatcherStage(self.rules)
        self._local = self._stage.task_local()
        self._state = TaskState.of(self._stage, self._local)

    def cut(self, cut: Cut) -> None:
        self._take_in(cut.positions)
        bare = cut.replace(batch_id=None, groups=(), excluded={})
        decision = decide(groups(self._state), progress_of(self._state), bare, self.rules, self._local.evaluations)
        effects = effects_of(self._state, bare, decision, self.rules)
        for emit in effects.records:
            if emit.topic is CUTS and emit.value != cut:
                self.differing.append(f"cut {cut.sequence}: decided otherwise")
        self._note(effects, f"~{cut.sequence:020d}")

    def rest(self) -> None:
        """What came after the last cut."""
        self._take_in({slot: records[-1].offset + 1 for slot, records in self.waiting.items() if records})

    def _note(self, effects: Outputs, origin: str) -> None:
        for emit in effects.records:
            if emit.topic is BATCHES and isinstance(emit.value, bytes):
                self.found[emit.partition or 0, emit.key.encode()] = emit.value
        self._state.stage(effects, origin)
        self._state.commit()
        self._local.committed(self._state)

    def _take_in(self, positions: Mapping[str, int]) -> None:
        for slot, offset in positions.items():
            records = self.waiting.get(slot, [])
            while records and records[0].offset < offset:
                self._process(records.pop(0))

    def _process(self, record: InputRecord) -> None:
        try:
            effects = self._stage.process(self._state, record, self._local)
        except PoisonRecordError:
            return  # the engine has set it aside
        index = self._stage.inputs.index(record.topic)
        self._note(effects, origin_of(index, record.partition, record.offset))


async def recompute(stack: Stack) -> tuple[int, list[str]]:
    """The number of batches, and what differs."""
    settings = BatcherSettings(**_options(stack.programs["batcher"].env))
    async with Log.open(stack.settings) as log:
        cuts = [decode(Cut, record.value, tuple(record.headers)) async for record in log.read(CUTS)]
        batches = {(r.partition, r.key or b""): r.value or b"" async for r in log.read(BATCHES)}
        waiting: dict[str, list[InputRecord]] = {}
        for topic in BatcherStage.inputs:
            async for record in log.read(topic):
                waiting.setdefault(f"{topic.name}/{record.partition}", []).append(_input(topic, record))
    work = Recomputing(settings.rules(), waiting)
    for cut in sorted(cuts, key=lambda cut: cut.sequence):
        work.cut(cut)
    work.rest()
    return len(batches), [*work.differing, *_compared(batches, work.found)]


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the service was started with."""
    said = {name.removeprefix("ROLLMILL_").lower(): value for name, value in environment.items()}
    return {name: None if value == "none" else value for name, value in said.items()}


def _input(topic: Topic, record: KafkaRecord) -> InputRecord:
    return InputRecord(topic, record.partition, record.offset, record.key or b"", record.value, tuple(record.headers))


def _compared(there: Bytes, found: Bytes) -> list[str]:
    names = sorted(there.keys() | found.keys())
    return [
        f"batch {key.decode()} of rank {rank} differs"
        for rank, key in names
        if there.get((rank, key)) != found.get((rank, key))
    ]
