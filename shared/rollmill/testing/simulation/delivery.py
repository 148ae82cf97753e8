"""Events in the order of a topic: sessions interleaved, calls in any order, some repeated, late or forged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.models import CompletionRecord, SessionClosed, SessionExpired, SessionOpened, SessionSpec, StrategySpec
from rollmill.testing.simulation.rng import chance
from rollmill.testing.simulation.world import World, describe_record

Event = SessionOpened | CompletionRecord | SessionClosed | SessionExpired


@dataclass(frozen=True)
class DeliveredEvents:
    """The topic's records in order, and the expected treatment of each call."""

    events: tuple[Event, ...]
    accepted: dict[str, tuple[CompletionRecord, ...]]
    """By session: the calls delivered before its end."""
    late: dict[str, tuple[CompletionRecord, ...]]
    """By session: the calls delivered after its end."""
    forged: int
    """Number of records with a known id and different content."""

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How hypothesis shows a topic."""
        lines = [
            describe_record(event) if isinstance(event, CompletionRecord) else f"  {event.type}"
            for event in self.events
        ]
        marked = [f"{event.session_id}{text}" for event, text in zip(self.events, lines, strict=True)]
        printer.text("\n".join(["DeliveredEvents, in order of arrival", *marked]))


def deliver(worlds: Sequence[World], builder: StrategySpec, rng: random.Random) -> DeliveredEvents:
    """One topic of all worlds' sessions. Each is (usually) opened, and closed; its calls are delivered in any order."""
    accepted: dict[str, tuple[CompletionRecord, ...]] = {}
    late: dict[str, tuple[CompletionRecord, ...]] = {}
    queues, forged = [], 0
    for world in worlds:
        records = tuple(rng.sample(world.records, len(world.records)))
        kept = max(len(records) - (rng.randint(1, 2) if chance(rng, 0.2) else 0), 0)
        accepted[world.session_id], late[world.session_id] = records[:kept], records[kept:]
        forgeries = [_forged(record) for record in records[:kept] if chance(rng, 0.05)]
        forged += len(forgeries)
        queues.append(
            [
                *_open_session(world.session_id, builder, records[:kept], forgeries, rng),
                *_after_close(records, kept, rng),
            ]
        )
    return DeliveredEvents(tuple(_interleaved(queues, rng)), accepted, late, forged)


def _open_session(
    session_id: str,
    builder: StrategySpec,
    records: Sequence[CompletionRecord],
    forgeries: Sequence[CompletionRecord],
    rng: random.Random,
) -> list[Event]:
    """Events up to the close; repeats and forgeries come after the record with their id."""
    again = [*(record for record in records if chance(rng, 0.15)), *forgeries]
    events: list[Event] = [*records, *rng.sample(again, len(again))]
    if chance(rng, 0.9):
        opened = SessionOpened(session_id=session_id, spec=SessionSpec(builder=builder), at=99.0)
        events.insert(0 if chance(rng, 0.8) else rng.randint(0, len(events)), opened)
    return [*events, SessionClosed(session_id=session_id, at=500.0)]


def _after_close(records: Sequence[CompletionRecord], kept: int, rng: random.Random) -> list[Event]:
    """Events after the close: late calls, some of them twice, and repeats of accepted ones."""
    late = list(records[kept:])
    events: list[Event] = [*late, *(record for record in late if chance(rng, 0.3))]
    events += [record for record in records[:kept] if chance(rng, 0.1)]
    if records and chance(rng, 0.2):
        events.append(SessionClosed(session_id=records[0].session_id, at=600.0))
    return rng.sample(events, len(events))


def _forged(record: CompletionRecord) -> CompletionRecord:
    return record.model_copy(update={"error": f"{record.error} or another"})


def _interleaved(queues: Sequence[list[Event]], rng: random.Random) -> list[Event]:
    found: list[Event] = []
    waiting = [list(reversed(queue)) for queue in queues]
    while waiting := [queue for queue in waiting if queue]:
        found.append(rng.choice(waiting).pop())
    return found
