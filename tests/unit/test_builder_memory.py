"""A task's memory budget: idle sessions move to a file, and only what cannot move has to end (rule T7)."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmill.codec import encode
from rollmill.errors import FatalError
from rollmill.models import CompletionRecord, Record, SessionClosed, SessionOpened, SessionSpec
from rollmill.runtime.stream.processor import InputRecord
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import assistant, choice, completion, user
from rollmill.topics import BUILT, COMPLETIONS
from rollmill_builder.sessions.expiry_timer import MANY_SESSIONS, ExpiryTimer
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.sessions.task_resources import MemoryLimits
from rollmill_builder.stage import BuilderStage, BuilderState
from rollmill_builder.storage.spill import PAGE, SpillFile, _pages

TURNS = 6


def task(**limits: Any) -> MemoryTask[BuilderState]:
    memory = MemoryLimits(**limits) if limits else None
    return MemoryTask(BuilderStage(registry=builder_registry(), partitions=1, late_window=1e6, memory=memory))


def session(name: str, at: float) -> Iterator[CompletionRecord | SessionOpened]:
    """A session of a few turns, with ids and text of its own."""
    yield SessionOpened(session_id=name, spec=SessionSpec(task_id=name, idle_seconds=1e6, deadline_seconds=1e6), at=at)
    number = int(name[1:])
    prompt, messages = [number, 2], [user(f"{name}?")]
    for turn in range(TURNS):
        reply = [10 * number + turn] * 1500 + [9]
        message = assistant(f"{name} says {turn} " * 40)
        yield completion(
            f"{name}.{turn}",
            prompt,
            choice(reply, message=message),
            at=at + turn,
            session_id=name,
            messages=messages,
        )
        prompt, messages = [*prompt, *reply, 3], [*messages, message, user("and?")]


def interleaved(count: int) -> list[Any]:
    """The events of many sessions, in an order that keeps each session's own; all are open at once."""
    rng = random.Random(5)  # noqa: S311  # no secret
    scripts = [session(f"s{number}", 1000.0 + number) for number in range(count)]
    events: list[Any] = [next(script) for script in scripts]
    while scripts:
        script = rng.choice(scripts)
        event = next(script, None)
        scripts = [item for item in scripts if event is not None or item is not script]
        events += [] if event is None else [event]
    return events


def feed(run: MemoryTask[BuilderState], events: list[Any], ticks: int = 0) -> None:
    for number, event in enumerate(events):
        run.feed(COMPLETIONS, event, key=event.session_id)
        if ticks and number % ticks == 0:
            run.punctuate(2000.0 + number)


def closings(count: int) -> list[Any]:
    return [SessionClosed(session_id=f"s{number}", at=5000.0) for number in range(count)]


def sent(run: MemoryTask[BuilderState]) -> list[tuple[str, bytes | None]]:
    outputs = (output for output in run.emitted if output.topic is not COMPLETIONS)
    return [
        (output.topic.name, encode(output.value) if isinstance(output.value, Record) else output.value)
        for output in outputs
    ]


def memory(run: MemoryTask[BuilderState]) -> Any:
    return run.local.memory


def resident(run: MemoryTask[BuilderState]) -> int:
    """Sessions with their calls in memory."""
    sessions = [value for _, value in run.state.items() if isinstance(value, OpenSession)]
    return sum(not item.calls.own_store().spilled for item in sessions)


def bytes_of_a_session() -> int:
    run = task()
    feed(run, list(session("s7", 1.0)))
    return int(memory(run).used_bytes)


def test_a_budget_for_fifty_sessions_lets_two_hundred_come_out() -> None:
    free, short = task(), task(memory_bytes=50 * bytes_of_a_session())
    for run in (free, short):
        feed(run, interleaved(200), ticks=50)
    assert memory(short).used_bytes <= 50 * bytes_of_a_session()
    assert memory(short).spills > 150
    assert resident(short) < 50 < resident(free) == 200
    for run in (free, short):
        feed(run, closings(200))
    assert sent(short) == sent(free)
    assert len(short.of(BUILT)) == 200
    assert not short.of(COMPLETIONS)
    assert short.changelog == free.changelog
    assert memory(short).used_bytes == 0


def test_spilled_sessions_restore_from_the_changelog_alone() -> None:
    run = task(memory_bytes=3 * bytes_of_a_session())
    feed(run, interleaved(20))
    assert dict(run.restored().items()) == dict(run.state.items())


def test_without_a_file_the_longest_idle_session_ends() -> None:
    run = task(memory_bytes=50 * bytes_of_a_session(), spill_bytes=0)
    feed(run, interleaved(60))
    run.punctuate(3000.0)
    expiries: list[Any] = [output.value for output in run.of(COMPLETIONS)]
    assert {expiry.reason for expiry in expiries} == {"memory_budget"}
    idle = sorted((value for _, value in run.state.items() if isinstance(value, OpenSession)), key=lambda s: s.last_at)
    assert [expiry.session_id for expiry in expiries] == [item.session_id for item in idle[: len(expiries)]]
    assert 9 <= len(expiries) <= 12
    run.punctuate(3001.5)
    assert len(run.of(COMPLETIONS)) == len(expiries)
    feed(run, expiries)
    run.punctuate(3003.0)
    assert len(run.of(COMPLETIONS)) == len(expiries)
    feed(run, closings(60))
    assert len(run.of(BUILT)) == 60
    assert run.counts["tokens_captured"] == run.counts["tokens_in_traces"] == 60 * TURNS * 1501


def test_with_a_full_file_the_rest_ends() -> None:
    one = bytes_of_a_session()
    run = task(memory_bytes=10 * one, spill_bytes=5 * one)
    feed(run, interleaved(40))
    run.punctuate(3000.0)
    assert 20 < len(run.of(COMPLETIONS)) < 32
    assert memory(run).spills > 0


def test_a_disk_that_cannot_be_written_spills_nothing(tmp_path: Path) -> None:
    run = task(memory_bytes=2 * bytes_of_a_session(), spill_directory=tmp_path / "missing")
    feed(run, interleaved(6))
    assert resident(run) == 6
    feed(run, closings(6))
    assert len(run.of(BUILT)) == 6


def test_a_file_that_lost_its_bytes_stops_the_task() -> None:
    run = task(memory_bytes=bytes_of_a_session())
    feed(run, interleaved(4))
    memory(run)._file._file().truncate(0)
    with pytest.raises(FatalError, match="spill file"):
        feed(run, closings(4))


def test_stretches_come_in_few_sizes() -> None:
    assert [_pages(pages * PAGE) for pages in (0, 1, 7, 8, 9, 13, 17, 100)] == [1, 1, 7, 8, 10, 14, 20, 112]


def test_pages_are_used_again_and_the_file_shrinks_when_it_is_empty(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, 4 * PAGE)
    first, second = file.write(b"a" * 5000), file.write(b"b")
    assert first is not None
    assert second is not None
    assert (first.read(), second.read()) == (b"a" * 5000, b"b")
    assert file.write(b"c" * 2 * PAGE) is None
    del first
    third = file.write(b"d" * 2 * PAGE)
    assert third is not None
    assert (third.offset, third.read(), second.read()) == (0, b"d" * 2 * PAGE, b"b")
    del second, third
    assert file.used_bytes == 0
    assert file._file().seek(0, 2) == 0
    assert list(tmp_path.iterdir()) == []


@contextmanager
def disk_that_takes(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: a write takes what fits, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_gives_its_pages_back(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, 8 * PAGE)
    kept = file.write(b"a" * 2 * PAGE)
    with disk_that_takes(3 * PAGE):
        for _ in range(5):
            with pytest.raises(OSError, match="too large"):
                file.write(b"b" * 4 * PAGE)
        assert file.used_bytes == 2 * PAGE
    again = file.write(b"c" * 4 * PAGE)
    assert again is not None
    assert kept is not None
    assert (again.offset, again.read(), kept.read()) == (2 * PAGE, b"c" * 4 * PAGE, b"a" * 2 * PAGE)


def test_f14_a_bit_that_the_disk_has_altered_stops_the_task_instead_of_altering_a_token() -> None:
    run = task(memory_bytes=bytes_of_a_session())
    feed(run, interleaved(4))
    file = memory(run)._file._file()
    for place in range(0, file.seek(0, 2), PAGE):  # a session has whole pages
        file.seek(place)
        altered = bytes([file.read(1)[0] ^ 1])
        file.seek(place)
        file.write(altered)
    with pytest.raises(FatalError, match="not those that were written"):
        feed(run, closings(4))


def attempt(run: MemoryTask[BuilderState], event: Any) -> None:
    """Process an event and apply its outputs, in a transaction that is yet to end."""
    record = InputRecord(COMPLETIONS, 0, 999, event.session_id.encode(), encode(event))
    run.state.stage(run.stage.process(run.state, record, run.local), "x")


def test_a_closed_session_is_forgotten_once_that_is_committed() -> None:
    run = task()
    feed(run, interleaved(3))
    used = memory(run).used_bytes
    for committed in (False, True):
        attempt(run, SessionClosed(session_id="s0", at=5000.0))
        assert memory(run).used_bytes == used
        if committed:
            run.state.commit()
            run.local.committed(run.state)
        else:
            run.state.rollback()
            run.local.rolled_back(run.state)
            assert memory(run).used_bytes == used
    assert memory(run).used_bytes < used


@pytest.mark.parametrize("limit", [1 << 40, 100_000])
def test_a_rollback_restores_the_sizes(limit: int) -> None:
    run = task(memory_bytes=limit)
    feed(run, interleaved(5))
    sizes = dict(memory(run)._sizes)
    *_, last = session("s1", 1001.0)
    assert isinstance(last, CompletionRecord)
    attempt(run, last.replace(completion_id="more", ended_at=2000.0))
    attempt(run, SessionOpened(session_id="s9", spec=SessionSpec(), at=2000.0))
    assert "s9:1" in memory(run)._sizes
    run.state.rollback()
    run.local.rolled_back(run.state)
    assert memory(run)._sizes.keys() == sizes.keys()
    assert memory(run).used_bytes == sum(memory(run)._sizes.values())
    if limit > sum(sizes.values()):
        assert memory(run)._sizes == sizes
    run.punctuate(10_000.0)
    feed(run, closings(5))
    assert memory(run).used_bytes == 0


def test_each_task_has_a_timer_and_a_budget_of_its_own() -> None:
    stage = BuilderStage(registry=builder_registry(), partitions=4, late_window=1e6)
    tasks = [MemoryTask(stage, partition=partition) for partition in range(4)]
    names = {1: "s1", 3: "s5"}
    for partition, name in names.items():
        feed(tasks[partition], [SessionOpened(session_id=name, spec=SessionSpec(idle_seconds=20.0), at=1000.0)])
    for now in (1010.0, 1030.0):
        for run in tasks:
            run.punctuate(now)
    expired: dict[int, list[Any]] = {run.partition: [output.value for output in run.of(COMPLETIONS)] for run in tasks}
    assert {
        partition: [expiry.session_id for expiry in expiries] for partition, expiries in expired.items() if expiries
    } == {partition: [name] for partition, name in names.items()}


def test_many_sessions_are_looked_at_more_seldom() -> None:
    timer = ExpiryTimer(every=1.0)
    sessions = [OpenSession(f"s{number}", 1) for number in range(2 * MANY_SESSIONS)]
    assert list(timer.due(sessions, 100.0, ())) == []
    assert [timer.too_early(100.0 + seconds) for seconds in (1.0, 2.5, 3.0)] == [True, True, False]
