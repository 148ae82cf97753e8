"""Tokens in flight, from the topics only (rule L4): records not processed yet, state, steps not acknowledged.

Stages are read from the source downstream. A token only ever moves downstream, and a stage's state, position and
outputs change in one transaction; so a token in flight when the reading begins is found here, or has its disposition
when the outcomes are read afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from rollmill.codec import Headers, decode, read_manifest
from rollmill.errors import PoisonRecordError
from rollmill.models import BatchHeader, Manifest, Rewound, StepAcknowledged, StepsResharded, TrainerEvent
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.runtime.kafka.log_reader import KafkaRecord, Log
from rollmill.runtime.stream.changelog import POSITION
from rollmill.topics import (
    ACKS,
    BATCHES,
    BUILT,
    STATE_BATCHER,
    STATE_BUILDER,
    STATE_REWARD_MERGER,
    TRAJECTORIES,
    Topic,
)

INTERNAL = "!"
"""Begins the changelog keys that are the engine's own."""


async def in_flight(log: Log, builder: BuilderState) -> AsyncIterator[Manifest]:
    """Manifests of everything that is in flight in a stage or in a step."""
    await builder.follow(log)
    for manifest in tuple(builder.state.live.values()):
        yield manifest
    async for manifest in _stage(log, STATE_REWARD_MERGER, BUILT):
        yield manifest
    async for manifest in _stage(log, STATE_BATCHER, TRAJECTORIES):
        yield manifest
    async for manifest in _unacknowledged(log):
        yield manifest


@dataclass
class StageState:
    """Live state and positions of a stage, folded from its changelog."""

    live: dict[tuple[int, str], Manifest] = field(default_factory=dict)
    """Manifests by changelog partition and key, where a state record has one."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Next input offset by ``topic/partition``."""

    def take(self, record: KafkaRecord) -> None:
        key = (record.key or b"").decode()
        if key == POSITION and record.value is not None:
            self.offsets |= orjson.loads(record.value)["offsets"]
        if not key.startswith(INTERNAL):
            self._set((record.partition, key), None if record.value is None else manifest_of(record))

    def _set(self, slot: tuple[int, str], manifest: Manifest | None) -> None:
        if manifest is None:
            self.live.pop(slot, None)
        else:
            self.live[slot] = manifest

    def in_flight(self) -> Iterator[Manifest]:
        """The live manifests, without those that the merger keeps for revisions of a session that it has sent on."""
        manifests = tuple(self.live.values())
        sent_on = {(item.session_id, item.attempt) for item in manifests if not item.units}
        return (item for item in manifests if (item.session_id, item.attempt) not in sent_on)

    def starts(self, topic: Topic) -> dict[int, int]:
        """Next offset by partition of one input topic."""
        entries = ((slot.rpartition("/"), offset) for slot, offset in self.offsets.items())
        return {int(number): offset for (name, _, number), offset in entries if name == topic.name}


def manifest_of(record: KafkaRecord) -> Manifest | None:
    headers: Headers = tuple(record.headers)
    return read_manifest(headers)


@dataclass
class BuilderState:
    """The builder's state, followed from look to look."""

    state: StageState = field(default_factory=StageState)
    _positions: Mapping[int, int] | None = None

    async def follow(self, log: Log) -> None:
        async for record in log.read(STATE_BUILDER, self._positions):
            self.state.take(record)
        self._positions = await log.positions()


async def _stage(log: Log, changelog: Topic, source: Topic) -> AsyncIterator[Manifest]:
    """What is in a stage's state, then what is at or beyond its position in ``source``."""
    state = StageState()
    async for record in log.read(changelog):
        state.take(record)
    for manifest in state.in_flight() if changelog is STATE_REWARD_MERGER else state.live.values():
        yield manifest
    async for record in log.read(source, state.starts(source)):
        waiting = manifest_of(record)
        if waiting is not None:
            yield waiting


@dataclass
class Acknowledged:
    """Which ranks have finished which steps."""

    _ranks: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def take(self, event: TrainerEvent) -> None:
        if isinstance(event, StepAcknowledged):
            self._ranks.setdefault((event.run, event.step), set()).add(event.rank)
        if isinstance(event, Rewound):
            self._take_back(event.run, event.next_step, event.rank)
        if isinstance(event, StepsResharded):
            self._take_back(event.run, event.next_step, None)

    def _take_back(self, run: str, next_step: int, rank: int | None) -> None:
        for (of_run, step), ranks in self._ranks.items():
            if of_run == run and step >= next_step:
                ranks.intersection_update(() if rank is None else ranks - {rank})

    def finished(self, header: BatchHeader) -> bool:
        return len(self._ranks.get((header.run, header.step), ())) >= header.world_size


async def _unacknowledged(log: Log) -> AsyncIterator[Manifest]:
    """The traces of every step that not all ranks have acknowledged."""
    acknowledged = Acknowledged()
    async for record in log.read(ACKS):
        with suppress(PoisonRecordError):  # the batcher writes it to the dead letters
            acknowledged.take(decode(ACKS.model, record.value, tuple(record.headers)))
    steps: dict[str, BatchHeader] = {}
    async for record in log.read(BATCHES):
        try:
            header = batch_header(record.value or b"")
        except PoisonRecordError:
            continue  # the trainer refuses it; tokens in no readable batch show as lost
        if header.placement >= steps.get(header.batch_id, header).placement:
            steps[header.batch_id] = header
    open_steps = {batch_id: header for batch_id, header in steps.items() if not acknowledged.finished(header)}
    for manifest in _traces(open_steps):
        yield manifest


def _traces(steps: Mapping[str, BatchHeader]) -> Iterator[Manifest]:
    for header in steps.values():
        for row in header.table:
            yield Manifest(session_id=row.session_id, attempt=row.attempt, units=row.units)
