"""The builder's stage on whole topics of generated sessions: interleaved, shuffled, repeated, late, forged.

Each session is built exactly once, from what was accepted, whatever the order; and a builder that is stopped at any
moment, and restored from its changelog, gives what an undisturbed one gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollmill.codec import decode, encode
from rollmill.models import CompletionRecord, Disposition, Record, StrategySpec, TokenRange, Trajectory
from rollmill.models.sampled_tokens import captured_units
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.simulation import END, DeliveredEvents, deliver
from rollmill.testing.simulation.strategies import examples, worlds
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES
from rollmill_builder.stage import BuilderStage, BuilderState

SPECS = [
    StrategySpec(strategy="prefix_merging"),
    StrategySpec(strategy="prefix_merging", config={"end_of_turn_token_id": END, "siblings": "exclude"}),
    StrategySpec(strategy="per_request"),
]

TOPICS = examples(300, share=5)

Task = MemoryTask[BuilderState]
Tokens = Counter[tuple[str, int, int]]


def task() -> Task:
    return MemoryTask(BuilderStage(registry=builder_registry(), partitions=1, late_window=1000.0))


@st.composite
def posts(draw: st.DrawFn) -> DeliveredEvents:
    count = draw(st.integers(1, 3))
    sessions = [draw(worlds(most=6, session_id=f"s{number}")) for number in range(count)]
    return deliver(sessions, draw(st.sampled_from(SPECS)), draw(st.randoms(use_true_random=True)))


def feed(run: Task, events: Iterable[Any]) -> None:
    for event in events:
        run.feed(COMPLETIONS, event, key=event.session_id)


def sent(run: Task) -> list[tuple[str, bytes | None]]:
    return [
        (output.topic.name, encode(output.value) if isinstance(output.value, Record) else output.value)
        for output in run.emitted
    ]


def trajectories(run: Task) -> list[Trajectory]:
    found = []
    for output in run.of(BUILT):
        assert isinstance(output.value, bytes)
        found.append(decode(Trajectory, output.value, output.headers))
    return found


def tokens(units: Iterable[TokenRange]) -> Tokens:
    return Counter((unit.completion_id, unit.choice, token) for unit in units for token in range(unit.start, unit.stop))


def captured(records: Sequence[CompletionRecord]) -> Tokens:
    return tokens(unit for record in records for unit in captured_units(record))


def outcomes(run: Task, session: str, disposition: Disposition, *, late: bool = False) -> Tokens:
    found: Tokens = Counter()
    for output in run.of(OUTCOMES):
        item: Any = output.value
        if item.session_id == session and item.disposition is disposition and (item.reason == "late") == late:
            found += tokens(item.units)
    return found


def in_order(post: DeliveredEvents) -> list[Any]:
    """What a topic would hold if nothing were repeated, forged, late or out of order."""
    calls = [record for records in post.accepted.values() for record in records]
    opened = [event for event in post.events if event.type == "session_opened"]
    closed = {event.session_id: event for event in reversed(post.events) if event.type == "session_closed"}
    return [*opened, *sorted(calls, key=lambda record: record.completion_id), *closed.values()]


@TOPICS
@given(posts())
def test_every_session_is_built_once_from_what_was_accepted(post: DeliveredEvents) -> None:
    run, undisturbed = task(), task()
    feed(run, post.events)
    feed(undisturbed, in_order(post))
    assert {item.session_id: encode(item) for item in trajectories(run)} == {
        item.session_id: encode(item) for item in trajectories(undisturbed)
    }
    assert sorted(item.session_id for item in trajectories(run)) == sorted(post.accepted)
    assert [error.reason for _, error in run.dead_letters] == ["conflict"] * post.forged


@TOPICS
@given(posts())
def test_captured_is_trained_or_excluded(post: DeliveredEvents) -> None:
    run = task()
    feed(run, post.events)
    for item in trajectories(run):
        accepted, late = post.accepted[item.session_id], post.late[item.session_id]
        assert outcomes(run, item.session_id, Disposition.CAPTURED) == captured([*accepted, *late])
        assert outcomes(run, item.session_id, Disposition.EXCLUDED, late=True) == captured(late)
        left = outcomes(run, item.session_id, Disposition.EXCLUDED)
        assert tokens(item.manifest.units) + left == captured(accepted)


@TOPICS
@given(posts(), st.floats(0, 1))
def test_a_restored_builder_goes_on_as_if_nothing_happened(post: DeliveredEvents, share: float) -> None:
    stop = round(share * len(post.events))
    undisturbed, stopped = task(), task()
    feed(undisturbed, post.events)
    feed(stopped, post.events[:stop])
    assert dict(stopped.restored().items()) == dict(stopped.state.items())
    stopped.restart(task().stage)
    feed(stopped, post.events[stop:])
    assert sent(stopped) == sent(undisturbed)
    assert stopped.changelog == undisturbed.changelog
    assert dict(stopped.restored().items()) == dict(undisturbed.state.items())
