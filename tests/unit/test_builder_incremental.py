"""Custom builders: the simple one gets the whole session, the incremental one gets records as they come."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.codec import decode, encode
from rollmill.models import (
    CompletionRecord,
    CompletionSession,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    StrategySpec,
    Trace,
    TraceTurn,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.strategies import BaseIncrementalBuilder, BaseTrajectoryBuilder, StrategyRegistry, trajectory_of
from rollmill.strategies.allow_list import SETTING
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import assistant, completion, session_of, user
from rollmill.topics import BUILT, COMPLETIONS
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.task_resources import MemoryLimits
from rollmill_builder.stage import BuilderStage, BuilderState

Traces = tuple[Trace, ...]


class Last(BaseIncrementalBuilder[Traces]):
    """A trace of each call, the last one first; fails at a call named ``bad``."""

    def start(self) -> Traces:
        return ()

    def add(self, state: Traces, record: CompletionRecord) -> Traces:
        if record.completion_id == "bad":
            raise RuntimeError(f"cannot read {record.completion_id} at {object()!r}")
        (choice,) = record.choices
        assert choice.token_ids is not None
        count = len(choice.token_ids)
        trace = Trace.model_validate(
            {
                "prompt_ids": record.prompt_ids,
                "response_ids": choice.token_ids,
                "loss_mask": [1] * count,
                "response_logprobs": choice.logprobs,
                "turns": (TraceTurn(completion_id=record.completion_id, start=0, stop=count),),
                "prompt_messages": record.request,
            }
        )
        return (trace, *state)

    def finish(self, state: Traces, session: CompletionSession) -> Trajectory:
        assert session.completions == ()
        return trajectory_of(session, state, metadata={"builder": "last"})


class Whole(BaseTrajectoryBuilder):
    """Says how much of the session it was given."""

    def build(self, session: CompletionSession) -> Trajectory:
        prompts = [record.prompt_ids.tolist() for record in session.completions if record.prompt_ids is not None]
        return trajectory_of(session, metadata={"prompts": prompts, "status": session.status.value})


def task(**limits: Any) -> MemoryTask[BuilderState]:
    classes: dict[str, type[BaseTrajectoryBuilder]] = {
        "last": Last,
        "whole": Whole,
        "prefix_merging": PrefixMergingBuilder,
    }
    registry = StrategyRegistry("builder", BaseTrajectoryBuilder, classes)  # type: ignore[type-abstract]  # only for subclass checks
    memory = MemoryLimits(**limits) if limits else None
    return MemoryTask(BuilderStage(registry=registry, partitions=1, late_window=100.0, memory=memory))


def opened(builder: str) -> SessionOpened:
    return SessionOpened(session_id="s1", spec=SessionSpec(builder=StrategySpec(strategy=builder)), at=1.0)


def calls() -> list[CompletionRecord]:
    """In another order than they began."""
    history = [user("?"), assistant("a"), user("2?")]
    return [
        completion("c2", [1, 2, 5, 9, 3], [7, 9], at=3.0, messages=history),
        completion("c1", [1, 2], [5, 9], at=2.0, messages=history[:1]),
    ]


def closed() -> SessionClosed:
    return SessionClosed(session_id="s1", at=9.0)


def feed(run: MemoryTask[BuilderState], *events: Any) -> None:
    for event in events:
        run.feed(COMPLETIONS, event, key="s1")


def trajectory(run: MemoryTask[BuilderState]) -> Trajectory:
    (output,) = run.of(BUILT)
    assert isinstance(output.value, bytes)
    found: Trajectory = decode(Trajectory, output.value, output.headers)
    return found


def names(found: Trajectory) -> list[str]:
    return [trace.turns[0].completion_id for trace in found.traces]


def test_records_come_in_the_order_of_acceptance() -> None:
    run = task()
    feed(run, opened("last"), *calls(), closed())
    found = trajectory(run)
    assert names(found) == ["c1", "c2"]
    assert found.traces[1].prompt_ids.tolist() == [1, 2, 5, 9, 3]
    assert found.traces[1].prompt_messages is not None
    assert found.traces[1].prompt_messages.startswith(b'{"messages":[{"content":"?"')
    assert found.excluded == ()


def test_calls_before_the_opening_are_given_once_it_is_known() -> None:
    run = task()
    first, second = calls()
    feed(run, first, opened("last"), second, closed())
    assert names(trajectory(run)) == ["c1", "c2"]


def test_a_restored_session_has_the_same_state() -> None:
    stopped, undisturbed = task(), task()
    first, second = calls()
    for run in (stopped, undisturbed):
        feed(run, opened("last"), first)
    stopped.state, stopped.stage = stopped.restored(), task().stage
    for run in (stopped, undisturbed):
        feed(run, second, closed())
    assert encode(trajectory(stopped)) == encode(trajectory(undisturbed))


def test_a_spilled_session_has_the_same_state() -> None:
    run = task(memory_bytes=1)
    feed(run, opened("last"), *calls(), closed())
    assert names(trajectory(run)) == ["c1", "c2"]


def test_a_failing_step_fails_the_session_at_its_end_and_loses_no_token() -> None:
    run = task()
    bad = completion("bad", [4], [5, 9], at=4.0)
    feed(run, opened("last"), bad, *calls())
    assert run.dead_letters == []
    feed(run, closed())
    found = trajectory(run)
    assert found.status is TrajectoryStatus.ERROR
    assert found.error is not None
    assert "RuntimeError: cannot read bad at <object object at 0x>" in found.error
    assert [(item.reason, item.tokens) for item in found.excluded] == [("builder_error", 6)]


def test_the_simple_builder_gets_the_whole_session_sorted() -> None:
    run = task()
    feed(run, opened("whole"), *calls(), closed())
    found = trajectory(run)
    assert found.metadata == {"prompts": [[1, 2], [1, 2, 5, 9, 3]], "status": "COMPLETED"}
    assert [(item.reason, item.tokens) for item in found.excluded] == [("builder_dropped", 4)]


def test_an_incremental_builder_can_be_given_a_whole_session() -> None:
    found = Last().build(session_of(*calls()))
    assert names(found) == ["c2", "c1"]


def test_incremental_builders_are_found_by_their_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "my_builders.py").write_text(
        "from rollmill.strategies import BaseIncrementalBuilder, trajectory_of\n"
        "class Counting(BaseIncrementalBuilder):\n"
        "    def start(self): return 0\n"
        "    def add(self, state, record): return state + 1\n"
        "    def finish(self, state, session): return trajectory_of(session, metadata={'calls': state})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(SETTING, "my_builders")
    run = task()
    feed(run, opened("my_builders:Counting"), *calls(), closed())
    assert trajectory(run).metadata == {"calls": 2}
