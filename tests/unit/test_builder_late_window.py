"""What the builder refuses because its session may have been trained and forgotten, and what it takes however old."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.codec import ADMIT_OLD
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, SessionClosed, SessionOpened, StrategySpec
from rollmill.runtime.stream.processor import StateView
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import completion
from rollmill.testing.simulation import deliver
from rollmill.testing.simulation.strategies import examples, worlds
from rollmill.topics import BUILT, COMPLETIONS
from rollmill_builder.sessions.late_window import LateWindow
from rollmill_builder.sessions.session_state import MarkerSweep
from rollmill_builder.stage import BuilderStage, BuilderState

WINDOW = 100.0
FUTURE = 1e9
Run = MemoryTask[BuilderState]


def builder(clock: float | None = FUTURE) -> Run:
    run: Run = MemoryTask(BuilderStage(registry=builder_registry(), partitions=1, late_window=WINDOW))
    if clock is not None:
        run.punctuate(clock)
    return run


def feed(run: Run, events: Iterable[Any], **more: Any) -> None:
    for event in events:
        run.feed(COMPLETIONS, event, key=event.session_id, **more)


def session(name: str, at: float, *, seconds: float = 3.0) -> list[Any]:
    call = completion(f"{name}-1", (1, 2), (5, 9), at=at + 1.0).replace(session_id=name)
    return [
        SessionOpened(session_id=name, at=at),
        call,
        SessionClosed(session_id=name, at=at + seconds),
    ]


def reasons(run: Run) -> list[str]:
    return [error.reason for _, error in run.dead_letters]


def test_f12_a_session_that_is_sent_again_after_the_window_is_refused_and_trained_once() -> None:
    run = builder()
    feed(run, session("s1", 1000.0))
    feed(run, session("s2", 1050.0))
    feed(run, session("s1", 1000.0))
    assert (len(run.of(BUILT)), run.dead_letters) == (2, [])
    feed(run, session("s3", 1110.0))
    feed(run, session("s1", 1000.0))
    assert len(run.of(BUILT)) == 3
    assert reasons(run) == ["too_old"] * 3
    assert all(error.units_held and not error.own_fault for _, error in run.dead_letters)
    assert "--admit-old" in str(run.dead_letters[0][1])


def test_f12_a_backlog_of_many_windows_is_built() -> None:
    run = builder(clock=2000.0)
    names = [f"s{number}" for number in range(50)]
    for number, name in enumerate(names):
        feed(run, session(name, 2000.0 + 40.0 * number))
        if number % 20 == 7:
            run.punctuate(10_000.0)
            run.restart()
    assert run.dead_letters == []
    assert [output.key for output in run.of(BUILT)] == names


def test_f12_a_session_that_was_open_all_the_time_goes_on() -> None:
    run = builder()
    first, second, end = session("long", 1000.0)
    feed(run, [first])
    for number in range(5):
        feed(run, session(f"s{number}", 1100.0 + 100.0 * number))
    feed(run, [second, end])
    assert (run.dead_letters, len(run.of(BUILT))) == ([], 6)


def test_f12_records_without_a_time_are_taken_and_their_session_is_remembered_for_a_window() -> None:
    run = builder()
    timeless = [event.replace(**dict.fromkeys(_times(event), 0.0)) for event in session("s0", 1.0)]
    feed(run, session("s1", 1000.0))
    feed(run, timeless)
    feed(run, session("s2", 1090.0))
    feed(run, timeless)
    assert (run.dead_letters, len(run.of(BUILT))) == ([], 3)


def _times(event: Any) -> tuple[str, ...]:
    return ("started_at", "ended_at") if isinstance(event, CompletionRecord) else ("at",)


def test_f12_a_session_that_came_late_is_remembered_for_a_window_from_then_on() -> None:
    run = builder()
    feed(run, session("s1", 1000.0))
    feed(run, session("late", 950.0))
    feed(run, session("s2", 1060.0))
    feed(run, session("late", 950.0))
    assert (run.dead_letters, len(run.of(BUILT))) == ([], 3)


def test_f12_a_late_call_keeps_the_marker() -> None:
    run = builder()
    late = completion("c9", (1, 2), (5, 9), at=1090.0).replace(session_id="s1")
    feed(run, session("s1", 1000.0))
    feed(run, [late])
    feed(run, session("s2", 1150.0))
    feed(run, [late])
    assert run.counts["duplicates"] == 1
    feed(run, session("s3", 1300.0))
    feed(run, [late])
    assert reasons(run) == ["too_old"]


def test_f12_a_wrong_clock_of_one_writer_makes_no_other_record_too_old() -> None:
    run = builder(clock=1020.0)
    for number in range(9):
        feed(run, session(f"wrong{number}", FUTURE + 1000.0 * number))
    feed(run, session("s1", 1010.0))
    assert (run.dead_letters, len(run.of(BUILT))) == ([], 10)


def test_f12_nothing_is_forgotten_before_the_task_knows_the_time() -> None:
    run = builder(clock=None)
    for number in range(9):
        feed(run, session(f"s{number}", 1000.0 + 200.0 * number))
    feed(run, session("s0", 1000.0))
    assert (run.dead_letters, len(run.of(BUILT))) == ([], 9)


def test_f12_what_an_operator_admits_is_taken() -> None:
    run = builder()
    for number in range(4):
        feed(run, session(f"s{number}", 1000.0 + 100.0 * number))
    feed(run, session("spooled", 1000.0))
    assert reasons(run) == ["too_old"] * 3
    feed(run, session("spooled", 1000.0), headers=((ADMIT_OLD, b"1"),))
    assert len(run.of(BUILT)) == 5


@pytest.mark.parametrize(("at", "refused"), [(0.0, False), (899.9, True), (900.0, False), (950.0, False)])
def test_f12_the_horizon_is_the_last_sweep_less_the_window(at: float, refused: bool) -> None:
    state: Any = StateView()
    state._values["sweep"] = MarkerSweep(at=1000.0)
    window = LateWindow(WINDOW)
    if refused:
        with pytest.raises(PoisonRecordError, match="too_old: its time 899"):
            window.refuse_forgotten(state, SessionOpened(session_id="s", at=at), ())
    else:
        window.refuse_forgotten(state, SessionOpened(session_id="s", at=at), ())


@examples(100)
@given(worlds(most=5, session_id="s1"), st.randoms(use_true_random=False), st.integers(0, 400))
def test_f12_whatever_is_sent_again_whenever_no_session_is_built_twice(world: Any, rng: Any, gap: int) -> None:
    run = builder()
    post = deliver([world], StrategySpec(strategy="prefix_merging"), rng)
    feed(run, post.events)
    captured = run.counts.get("tokens_captured", 0.0)
    last = max(getattr(event, name) for event in post.events for name in _times(event))
    for number in range(4):
        feed(run, [SessionClosed(session_id=f"other{number}", at=last + 1.0 + gap / 4 * number)])
    feed(run, post.events)
    assert sum(output.key == "s1" for output in run.of(BUILT)) == 1
    assert run.counts.get("tokens_captured", 0.0) == captured
