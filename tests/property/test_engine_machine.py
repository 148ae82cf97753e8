"""The stage engine against a model: kill points, batches, restarts, zombies, failures of every call.

The real `Task`, changelog and transaction code run on Kafka in memory, in virtual time. After every step, what is
committed is what a plain fold of the input log up to the committed position gives: outputs, dead letters, state.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from aiokafka import TopicPartition
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollmill.codec import DEAD_LETTER, JSON, decode, header
from rollmill.errors import FatalError, FencedError, PoisonRecordError
from rollmill.models import DeadLetterInfo
from rollmill.runtime.kafka.transaction import ProducerRecord, Transaction
from rollmill.runtime.stream import (
    InputRecord,
    OutputRecord,
    Outputs,
    Processor,
    StateUpdate,
    StateView,
    TaskContext,
    TaskLocal,
)
from rollmill.runtime.stream.batch_processor import BatchProcessor
from rollmill.runtime.stream.changelog import OWNER, POSITION, Position
from rollmill.runtime.stream.state import TaskState
from rollmill.runtime.stream.task import Task
from rollmill.runtime.stream.task_identity import TaskIdentity, task_identity
from rollmill.runtime.stream.task_stop import NOTES
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings
from rollmill.testing.memory_kafka import LinkFault, MemoryBroker, MemoryKafkaClients, NetworkLink, ProcessKilledError
from rollmill.testing.memory_kafka.log import LogEntry, TransactionStatus
from rollmill.testing.virtual_time import VirtualTimeLoop
from rollmill.topics import DEAD_LETTERS, Partitioning, Topic, changelog

INPUT = Topic("in", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "commands")
OUTPUT = Topic("out", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "results")
STATE = changelog("teller", Partitioning.SHARED)
PREFIX = "m."
LIMIT, LEAK, MANY = 2, 2, 3
REFUSED_BYTES = 2000
"""More than the broker takes, less than the registry allows: a refusal that only the broker sees."""

SETTINGS = ServiceSettings(
    prefix=PREFIX,
    partitions=1,
    poll_records=3,
    poll_ms=250,
    transaction_timeout_ms=10_000,
    deadline_seconds=5,
    dead_letter_limit=LIMIT,
    dead_letter_leak=LEAK,
)

WORDS = ["u", "v"]
FAULTY = ["bad u", "bug u", "huge u", "bug v", "huge w"]
"""Of clients, and ours by more keys than the limit."""
COMMANDS = st.sampled_from([*(f"{verb} {word}" for verb in ("add", "add", "set", "end") for word in WORDS), *FAULTY])

CALLS = st.sampled_from(["start", "send", "offsets", "commit", "commit", "fetch", "look"])
FAULTS = st.sampled_from(LinkFault)

Offsets = tuple[int, ...]


class Book(TaskLocal):
    """Which words the timer asked for; and what it was told of, which has to be what is committed."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, Offsets]] = set()
        self.kept: list[int] = []
        """Offsets of the records that were applied and committed, the newest one before the restore first."""
        self._applied: list[int] = []
        self.is_closed = False

    def apply(self, offset: int) -> None:
        assert not self.is_closed
        self._applied.append(offset)

    def committed(self, state: StateView[Any]) -> None:
        assert not self.is_closed
        self.kept += self._applied
        self._applied = []
        assert state.get("total") == (tuple(self.kept[-1:]) or None)

    def rolled_back(self, state: StateView[Any]) -> None:
        assert not self.is_closed
        self._applied = []
        assert state.get("total") == (tuple(self.kept[-1:]) or None)

    def close(self) -> None:
        self.is_closed = True


class Teller(Processor[Offsets, Book]):
    """Keeps by word the offsets of the records that named it. A timer asks to end a word that has many."""

    name = "teller"
    inputs = (INPUT,)
    state_topic = STATE

    def task_local(self) -> Book:
        return Book()

    def process(self, state: StateView[Offsets], record: InputRecord, _local: Book) -> Outputs:
        verb, word = (record.value or b"").decode().split()
        if verb == "bad":
            raise PoisonRecordError("bad_word", "never told")
        if verb == "bug":
            raise KeyError(word)
        told = OutputRecord(OUTPUT, word, told_of(record.offset, verb, word, state.get(word) or ()))
        total = StateUpdate("total", str(record.offset).encode(), replaces=True)
        if verb == "end":
            return Outputs((told,), (total,), deletes=(word,))
        return Outputs((told,), (StateUpdate(word, str(record.offset).encode(), replaces=verb == "set"), total))

    def apply(self, key: str, value: Offsets | None, payload: bytes, local: Book) -> Offsets:
        if key == "total":
            local.apply(int(payload))
        return (*(value or ()), int(payload))

    def punctuate(self, state: StateView[Offsets], context: TaskContext, local: Book) -> Outputs:
        due = [(word, value) for word, value in state.items() if len(value) >= MANY]
        fresh = [item for item in due if item not in local.asked]
        local.asked.update(fresh)
        return Outputs(
            tuple(OutputRecord(INPUT, word, f"end {word}".encode(), partition=context.partition) for word, _ in fresh)
        )


def told_of(offset: int, verb: str, word: str, before: Offsets) -> bytes:
    padding = b"." * REFUSED_BYTES if verb == "huge" else b""
    return f"{offset} {verb} {word} {list(before)}".encode() + padding


@dataclass
class Model:
    """A plain fold of the input, without batches, processes or failures."""

    accepted: list[int] = field(default_factory=list)
    """Offsets of the records that were no dead letters."""
    outputs: list[bytes] = field(default_factory=list)
    letters: list[int] = field(default_factory=list)
    state: dict[str, Offsets] = field(default_factory=dict)
    level: float = 0.0
    keys: set[str] = field(default_factory=set)
    highest: float = 0.0

    def take(self, entry: LogEntry) -> None:
        verb, word = (entry.value or b"").decode().split()
        if verb in ("bad", "bug", "huge"):
            self.letters.append(entry.offset)
            self._count(verb, word)
        else:
            self._tell(entry.offset, verb, word)
            self.level = max(0.0, self.level - 1 / LEAK)
            self.keys = self.keys if self.level else set()
        self.highest = max(self.highest, self.level)

    def _count(self, verb: str, key: str) -> None:
        if verb != "bad" and key not in self.keys:
            self.level += 1
            self.keys.add(key)

    def _tell(self, offset: int, verb: str, word: str) -> None:
        self.accepted.append(offset)
        before = self.state.get(word, ())
        self.outputs.append(told_of(offset, verb, word, before))
        after = {"add": (*before, offset), "set": (offset,), "end": ()}[verb]
        self.state = {**self.state, word: after, "total": (offset,)}
        if not after:
            del self.state[word]


def folded(entries: Sequence[LogEntry]) -> Model:
    model = Model()
    for entry in entries:
        model.take(entry)
    return model


@dataclass
class Process:
    """One process of the task: `Task.run` on a line of its own."""

    line: NetworkLink
    task: Task[Offsets]
    stop: asyncio.Event
    job: asyncio.Task[None]

    @property
    def book(self) -> Book:
        local = self.task.processor.local
        assert isinstance(local, Book)
        return local

    @property
    def ended(self) -> bool:
        return self.job.done()

    def failure(self) -> BaseException | None:
        return None if self.job.cancelled() else self.job.exception()


class Cluster:
    """The broker, the processes, and what is committed."""

    def __init__(self, stage: Callable[[], Processor[Offsets, Book]] = Teller) -> None:
        self.loop = VirtualTimeLoop()
        self._stage = stage
        self.identity = task_identity(Teller(), 0, SETTINGS)
        self.input, self.output, self.letters = (
            TopicPartition(topic.full_name(PREFIX), 0) for topic in (INPUT, OUTPUT, DEAD_LETTERS)
        )
        self.broker = MemoryBroker({self.output.topic: REFUSED_BYTES})
        self.processes: list[Process] = []

    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.ended]

    def start(self, seconds: float, *, limit: int = LIMIT) -> Process:
        return self.loop.run_until_complete(self._start(seconds, limit))

    async def _start(self, seconds: float, limit: int) -> Process:
        line, stop = NetworkLink(seconds), asyncio.Event()
        settings = SETTINGS.model_copy(update={"dead_letter_limit": limit})
        clients = MemoryKafkaClients(settings, self.broker, line)
        tools = TaskTools(settings, clients, SystemClock(), Metrics("teller"), Health())
        task = Task(self._stage(), self.identity, tools)
        process = Process(line, task, stop, asyncio.create_task(task.run(stop)))
        self.processes.append(process)
        return process

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def wait_until_consumed(self) -> None:
        """Everything, what timers append included, by whoever is at work."""
        for _ in range(200):
            self.wait(1.0)
            if self.broker.logs[self.input].committed()[-1].offset < self.position().offsets["in/0"]:
                return
        raise AssertionError("what is in the log is never consumed")

    def kill(self, process: Process) -> None:
        process.line.kill()
        process.job.cancel()
        with suppress(BaseException):
            self.loop.run_until_complete(process.job)

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        if rest:
            self.loop.run_until_complete(asyncio.wait(rest))
        self.loop.close()

    # ---- what is committed ---------------------------------------------------------------------------------------

    def position(self) -> Position:
        """As the newest transaction wrote it down."""
        found = [entry.value for entry in self._changelog() if entry.key == POSITION.encode()]
        return Position.decode(found[-1] or b"") if found else Position({"in/0": 0})

    def consumed(self) -> Model:
        reached = self.position().offsets["in/0"]
        return folded([entry for entry in self.broker.logs[self.input].committed() if entry.offset < reached])

    def committed_offset(self) -> int | None:
        return self.broker.offsets[self.identity.group_id].get(self.input)

    def restored(self) -> dict[str, Offsets]:
        live: dict[str, bytes] = {}
        for entry in self._changelog():
            key = (entry.key or b"").decode()
            live.pop(key, None)
            if entry.value is not None and key not in (OWNER, POSITION, *NOTES):
                live[key] = entry.value
        state = TaskState.of(Teller(), Book())
        state.restore(live.items())
        return dict(state.items())

    def told(self) -> list[bytes | None]:
        return [entry.value for entry in self.broker.logs[self.output].committed()]

    def set_aside(self) -> list[int]:
        infos = [header(entry.headers, DEAD_LETTER) for entry in self.broker.logs[self.letters].committed()]
        return [decode(DeadLetterInfo, info, (("content-type", JSON.encode()),)).offset for info in infos]

    def _changelog(self) -> Sequence[LogEntry]:
        return self.broker.logs[self.identity.changelog].committed()


class EngineMachine(RuleBasedStateMachine):
    """Drives a `Cluster`. At the end one process is left to finish, whatever happened before."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    @rule(commands=st.lists(COMMANDS, min_size=1, max_size=5), committed=st.integers(0, 5).map(bool))
    def produce(self, commands: list[str], *, committed: bool) -> None:
        for command in commands:
            status = TransactionStatus.COMMITTED if committed else TransactionStatus.ABORTED
            key = command.split()[1].encode()
            self.cluster.broker.produce(self.cluster.input, key, command.encode(), status=status)

    @precondition(lambda self: len(self.cluster.alive()) < 3)
    @rule(seconds=st.sampled_from([0.001, 0.003, 0.007]))
    def start(self, seconds: float) -> None:
        self.cluster.start(seconds)

    @rule(seconds=st.sampled_from([0.002, 0.01, 0.05, 0.05, 0.3, 1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.wait(seconds)

    @precondition(lambda self: self.cluster.alive())
    @rule(data=st.data(), call=CALLS, fault=FAULTS)
    def arm(self, data: st.DataObject, call: str, fault: LinkFault) -> None:
        self._someone(data).line.armed[call] = fault

    @rule(call=CALLS, fault=FAULTS, commands=st.lists(COMMANDS, min_size=1, max_size=5))
    def strike_at_work(self, call: str, fault: LinkFault, commands: list[str]) -> None:
        """The newest process is at work when its call fails."""
        process = self.cluster.alive()[-1] if self.cluster.alive() else self.cluster.start(0.002)
        self.cluster.wait(1.0)
        process.line.armed[call] = fault
        self.produce(commands, committed=True)
        self.cluster.wait(1.0)

    @rule(commands=st.lists(COMMANDS, min_size=1, max_size=5))
    def leave_a_commit_in_doubt(self, commands: list[str]) -> None:
        self.strike_at_work("commit", LinkFault.ANSWER_LOST, commands)

    @precondition(lambda self: self.cluster.alive())
    @rule(data=st.data(), what=st.sampled_from(["kill", "cut", "cut", "mend", "mend", "drain"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        process = self._someone(data)
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: self.cluster.kill(process),
            "cut": process.line.cut,
            "mend": process.line.mend,
            "drain": process.stop.set,
        }
        actions[what]()

    @rule()
    def expire(self) -> None:
        self.cluster.broker.expire(self.cluster.identity.transactional_id)

    @rule()
    def compact(self) -> None:
        self.cluster.broker.logs[self.cluster.identity.changelog].compact()

    def _someone(self, data: st.DataObject) -> Process:
        return data.draw(st.sampled_from(self.cluster.alive()))

    @invariant()
    def what_is_committed_is_what_the_model_gives(self) -> None:
        cluster, model, position = self.cluster, self.cluster.consumed(), self.cluster.position()
        assert cluster.told() == model.outputs
        assert cluster.set_aside() == model.letters
        assert cluster.restored() == model.state
        assert abs(position.dead_letter_level - model.level) < 1e-9
        assert cluster.committed_offset() in (position.offsets["in/0"], None)

    @invariant()
    def each_task_local_is_told_of_each_commit_and_rollback_once(self) -> None:
        """What it has kept is a part of what was accepted, without gaps and repeats."""
        accepted = self.cluster.consumed().accepted
        for process in self.cluster.processes:
            kept = process.book.kept
            start = accepted.index(kept[0]) if kept else 0
            assert kept == accepted[start : start + len(kept)]
            assert process.book.is_closed == process.ended

    @invariant()
    def processes_end_for_good_reasons_only(self) -> None:
        for process in self.cluster.processes:
            failure = process.failure() if process.ended else None
            if isinstance(failure, FatalError) and not isinstance(failure, FencedError):
                assert "dead letters in hand" in str(failure)
            else:
                assert failure is None or isinstance(failure, (FencedError, ProcessKilledError)), repr(failure)

    @invariant()
    def the_dead_letter_limit_survives_restarts(self) -> None:
        assert self.cluster.consumed().highest <= LIMIT

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self.cluster.close()

    def _finish(self) -> None:
        """Every fault ends, and everybody goes on for a while; then one more process takes all that is left."""
        cluster = self.cluster
        for process in cluster.alive():
            process.line.armed.clear()
            process.line.mend()
        cluster.wait(100.0)
        self.what_is_committed_is_what_the_model_gives()
        last = cluster.start(0.001, limit=1000)
        cluster.wait(1.0)
        cluster.broker.produce(cluster.input, b"k", b"add w")
        cluster.wait_until_consumed()
        self.what_is_committed_is_what_the_model_gives()
        self.processes_end_for_good_reasons_only()
        assert cluster.alive() == [last], "a zombie goes on"
        assert cluster.committed_offset() == cluster.position().offsets["in/0"]
        assert dict(last.task.processor.state.items()) == cluster.consumed().state
        assert last.book.kept[-1:] == cluster.consumed().accepted[-1:]
        last.stop.set()
        cluster.loop.run_until_complete(last.job)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of expected warnings."""
    with structlog.testing.capture_logs():
        yield


def run(examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_what_comes_out_is_what_the_model_gives_whatever_happens() -> None:
    run(500, Phase.generate)


class Refused(Teller):
    """Its timer sends what the broker does not take."""

    def punctuate(self, _state: StateView[Offsets], _context: TaskContext, _local: Book) -> Outputs:
        return Outputs((OutputRecord(OUTPUT, "u", b"." * (REFUSED_BYTES + 1)),))


def test_a_task_whose_timer_is_refused_stops_and_says_so() -> None:
    cluster = Cluster(Refused)
    try:
        process = cluster.start(0.001)
        cluster.wait(10.0)
        assert process.ended
        failure = process.failure()
        assert isinstance(failure, FatalError)
        assert "MessageSizeTooLargeError" in str(failure)
    finally:
        cluster.close()


async def _send_and_look_away(self: Transaction, records: Sequence[ProducerRecord]) -> list[int]:
    """As whoever sends and commits: the commit waits for the sends, and says nothing of those that failed."""
    producer = self._producer
    sends = [await producer.send(r.topic, r.value, r.key, r.partition, r.headers) for r in records]
    found = await asyncio.gather(*sends, return_exceptions=True)
    return [-1 if isinstance(item, BaseException) else item.offset for item in found]


def without_awaited_sends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "_send", _send_and_look_away)


def without_changelog(patch: pytest.MonkeyPatch) -> None:
    stage = TaskState.stage
    patch.setattr(TaskState, "stage", lambda *arguments: stage(*arguments)[:0])


def without_fencing(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    patch.setattr(TaskIdentity, "transactional_id", property(lambda self: f"{self.stage}.{next(numbers)}"))


def without_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TaskState, "rollback", TaskState.commit)


def without_looking_at_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Task, "_refuse_newer_owner", lambda *_: None)


def without_position_of_the_doubtful_transaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Task, "_resolve_in_doubt", lambda *_: None)


def without_a_remembered_dead_letter_level(patch: pytest.MonkeyPatch) -> None:
    settle = BatchProcessor.settle
    patch.setattr(BatchProcessor, "settle", lambda self, _, *, committed: settle(self, None, committed=committed))


def without_telling_of_rollbacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Book, "rolled_back", TaskLocal.rolled_back)


def without_telling_of_commits(patch: pytest.MonkeyPatch) -> None:
    settle = BatchProcessor.settle

    def keep(self: BatchProcessor[Any], position: Position | None, *, committed: bool) -> None:
        local, self.local = self.local, TaskLocal() if committed else self.local
        settle(self, position, committed=committed)
        self.local = local

    patch.setattr(BatchProcessor, "settle", keep)


@pytest.mark.parametrize(
    "damage",
    [
        without_awaited_sends,
        without_changelog,
        without_fencing,
        without_rollback,
        without_looking_at_owners,
        without_position_of_the_doubtful_transaction,
        without_a_remembered_dead_letter_level,
        without_telling_of_rollbacks,
        without_telling_of_commits,
    ],
    ids=lambda damage: damage.__name__,
)
def test_the_machine_finds_an_engine(
    damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    with pytest.raises(AssertionError):
        run(500, Phase.generate)
