"""Several replicas around one topic: who keeps the house, what it forgets, and pauses that hold everywhere."""

import asyncio
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from rollmill.codec import Headers
from rollmill.models import PauseMode, PolicyPause, PolicyVersion, SessionEntry, SessionSpec, SessionState
from rollmill.models.session import ALIVE_SECONDS
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.topics import SESSIONS, Topic
from rollmill_capture.admission import Admission
from rollmill_capture.coordination.membership import EXPIRY_SECONDS, Membership
from rollmill_capture.coordination.policies import AnnouncedVersions, PausedPolicies, PolicyPauses
from rollmill_capture.coordination.session_retention import SessionRetention
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.coordination.sessions_topic import SessionsTopic
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.settings import CaptureSettings

WAIT = 5.0
RETENTION = 100.0


@dataclass
class Topicful(MemoryEventWriter):
    """A log that every replica reads at once, in one order."""

    readers: list[SessionsTopic] = field(default_factory=list)
    held_back: list[tuple[str, bytes | None, Headers]] | None = None
    """A list: what is told goes here instead, until a test lets it through."""

    async def append(self, topic: Topic, key: str, value: bytes) -> None:
        await super().append(topic, key, value)
        for sessions_topic in self.readers:
            sessions_topic.apply(key, self.appended[-1].record)

    async def append_best_effort(self, topic: Topic, key: str, value: bytes | None, headers: Headers = ()) -> None:
        if self.held_back is not None:
            self.held_back.append((key, value, headers))
            return
        await super().append_best_effort(topic, key, value, headers)
        if value is None:
            for sessions_topic in self.readers:
                sessions_topic.forget(key, headers)

    async def let_through(self) -> None:
        held, self.held_back = self.held_back or [], None
        for key, value, headers in held:
            await self.append_best_effort(SESSIONS, key, value, headers)


@dataclass
class Replica:
    name: str
    log: Topicful
    clock: ManualClock
    pauses: PausedPolicies = field(default_factory=lambda: PausedPolicies(WAIT))

    def __post_init__(self) -> None:
        self.table, self.announced = SessionTable(), AnnouncedVersions()
        self.sessions_topic = SessionsTopic(self.table, PolicyPauses(self.pauses, self.announced))
        for item in self.log.appended:
            self.sessions_topic.apply(item.key, item.record)
        self.log.readers.append(self.sessions_topic)
        self.membership = Membership(
            self.sessions_topic.pauses, self.log, self.clock, self.sessions_topic.replicas, self.name
        )
        self.retention = SessionRetention(
            table=self.table,
            membership=self.membership,
            admission=Admission({}, self.announced.newest),
            event_writer=self.log,
            clock=self.clock,
            metrics=Metrics("capture"),
            retention=RETENTION,
        )


@dataclass
class World:
    clock: ManualClock = field(default_factory=lambda: ManualClock(10_000.0))
    log: Topicful = field(default_factory=Topicful)

    async def replica(self, name: str) -> Replica:
        made = Replica(name, self.log, self.clock)
        await made.membership.send_heartbeat()
        return made

    async def write(self, entry: SessionEntry) -> None:
        await self.log.append(SESSIONS, entry.session_id, entry.model_dump_json().encode())


def opened(name: str, at: float, attempt: int = 1, **spec: float) -> SessionEntry:
    return SessionEntry(
        session_id=name, attempt=attempt, state=SessionState.OPEN, spec=SessionSpec(**spec), opened_at=at, token=name
    )


def closed(name: str, at: float, attempt: int = 1) -> SessionEntry:
    return opened(name, at - 1, attempt).replace(state=SessionState.CLOSED, closed_at=at)


def keepers(*replicas: Replica) -> list[str]:
    return [replica.name for replica in replicas if replica.membership.is_leader]


async def test_the_living_replica_with_the_smallest_id_keeps_the_house_and_passes_it_on() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    assert keepers(a, b) == ["a"]
    await a.membership.leave()
    assert "b" in keepers(a, b)
    await a.membership.send_heartbeat()
    assert keepers(a, b) == ["a"]
    world.clock.advance(ALIVE_SECONDS + 1)
    await b.membership.send_heartbeat()
    assert "b" in keepers(a, b)


async def test_what_is_over_for_the_retention_is_forgotten_by_all_and_nothing_else() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    now = world.clock.now()
    for entry in (
        closed("old", now - RETENTION - 1),
        closed("new", now - RETENTION + 1),
        opened("abandoned", now - RETENTION - 11, deadline_seconds=10.0),
        opened("working", now - RETENTION - 11, deadline_seconds=10_000.0),
    ):
        await world.write(entry)
    await b.retention.sweep()
    assert world.log.erased == []
    await a.retention.sweep()
    assert sorted(key for _, key, _ in world.log.erased) == ["abandoned", "old"]
    for replica in (a, b):
        assert sorted(entry.session_id for entry in replica.table.entries()) == ["new", "working"]
        assert replica.table.of_token("old") is None
    await a.retention.sweep()
    assert len(world.log.erased) == 2


async def test_a_tombstone_that_a_later_attempt_has_overtaken_forgets_nothing_and_the_entry_is_written_again() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    await world.write(closed("s", world.clock.now() - RETENTION - 1))
    world.log.held_back = []
    await a.retention.sweep()
    again = opened("s", world.clock.now(), attempt=2)
    await world.write(again)
    await world.log.let_through()
    assert (a.table.get("s"), b.table.get("s")) == (again, again)
    written = len(world.log.appended)
    await b.retention.sweep()
    await a.retention.sweep()
    await a.retention.sweep()
    assert [item.record for item in world.log.appended[written:]] == [again]


async def test_a_table_read_anew_has_what_the_topic_says_tombstones_and_all() -> None:
    table = SessionTable()
    sessions_topic = SessionsTopic(table, PolicyPauses(PausedPolicies(), AnnouncedVersions()))
    sessions_topic.apply("s", closed("s", 5.0))
    sessions_topic.forget("s", (("attempt", b"1"),))
    assert len(table) == 0
    sessions_topic.apply("s", opened("s", 6.0, attempt=2))
    sessions_topic.forget("s", ())
    assert len(table) == 0
    sessions_topic.forget("never-known", ())


async def test_while_the_log_is_away_nothing_is_forgotten() -> None:
    world = World()
    a = await world.replica("a")
    await world.write(closed("s", world.clock.now() - RETENTION - 1))
    world.log.failure = NotAcknowledgedError("away")
    await a.retention.sweep()
    assert len(a.table) == 1
    world.log.failure = None
    await a.retention.sweep()
    assert len(a.table) == 0


async def test_dead_replicas_leave_the_topic() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    world.clock.advance(EXPIRY_SECONDS + 1)
    await a.membership.send_heartbeat()
    await a.retention.sweep()
    assert [key for _, key, _ in world.log.erased] == ["!replica/b"]
    assert list(b.sessions_topic.replicas.known) == ["a"]


def test_a_retention_below_the_builders_memory_is_refused() -> None:
    with pytest.raises(ValidationError, match="session_retention_seconds 5 must be above late_window_seconds"):
        CaptureSettings(session_retention_seconds=5.0)


async def paused(replica: Replica, mode: PauseMode = PauseMode.WAIT) -> PolicyPause:
    gate = replica.sessions_topic.pauses.next("p", mode)
    replica.sessions_topic.pauses.apply(gate)
    await replica.log.append(SESSIONS, gate.key, gate.model_dump_json().encode())
    return gate


async def test_a_pause_holds_at_all_replicas_and_is_complete_when_the_last_one_is_idle() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    async with asyncio.timeout(WAIT), b.pauses.in_flight("p"):
        gate = await paused(a)
        assert b.pauses.status("p")["mode"] == "wait"
        beating = asyncio.create_task(b.membership.send_heartbeats())
        assert not await a.membership.wait_reached(gate, 0.05)
        assert a.membership.awaited(gate) == 1
    async with asyncio.timeout(WAIT):
        assert await a.membership.wait_reached(gate, WAIT)
    beating.cancel()


async def test_calls_in_flight_need_not_end_where_the_mode_lets_them_go_on_but_the_others_have_to_know() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    async with asyncio.timeout(WAIT), b.pauses.in_flight("p"), a.pauses.in_flight("p"):
        gate = await paused(a, PauseMode.KEEP)
        assert not await a.membership.wait_reached(gate, 0.01)
        await b.membership.send_heartbeat()
        assert await a.membership.wait_reached(gate, 0.01)


async def test_a_replica_that_died_is_not_waited_for() -> None:
    world = World()
    a, _ = await world.replica("a"), await world.replica("b")
    gate = await paused(a)
    world.clock.advance(ALIVE_SECONDS + 1)
    assert await a.membership.wait_reached(gate, 0.01)


async def test_a_resume_at_any_replica_brings_the_version_to_all() -> None:
    world = World()
    a, b = await world.replica("a"), await world.replica("b")
    await paused(a)
    resume = b.sessions_topic.pauses.next("p", None, PolicyVersion(0, 7), cache_reset=True)
    assert resume.number == 2
    await world.log.append(SESSIONS, resume.key, resume.model_dump_json().encode())
    for replica in (a, b):
        assert not replica.pauses.status("p")["paused"]
        assert replica.announced.newest("p") == PolicyVersion(0, 7)


def test_an_older_gate_changes_nothing_and_of_equal_ones_the_later_in_the_log_holds() -> None:
    pauses = PolicyPauses(PausedPolicies(), AnnouncedVersions())
    pauses.apply(PolicyPause(policy="p", number=2, mode=None))
    pauses.apply(PolicyPause(policy="p", number=1, mode=PauseMode.WAIT))
    assert not pauses.local.status("p")["paused"]
    pauses.apply(PolicyPause(policy="p", number=2, mode=PauseMode.KEEP))
    assert pauses.local.status("p")["paused"]


def test_a_replica_that_starts_during_a_pause_is_paused_and_knows_the_version() -> None:
    pauses = PolicyPauses(PausedPolicies(), AnnouncedVersions())
    pauses.apply(PolicyPause(policy="p", number=1, mode=None, version=PolicyVersion(0, 3)))
    late = SessionsTopic(SessionTable(), PolicyPauses(PausedPolicies(), AnnouncedVersions()))
    pause = pauses.next("p", PauseMode.WAIT)
    late.apply(pause.key, pause)
    assert late.pauses.local.status("p")["paused"]
    assert late.pauses.announced.newest("p") == PolicyVersion(0, 3)
