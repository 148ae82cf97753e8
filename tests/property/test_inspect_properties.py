"""``rollmill inspect`` on any topic: every call is shown once, and the account is that of the builder's stage."""

from __future__ import annotations

import io
import random

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollmill.cli.inspect.command import json_line
from rollmill.cli.inspect.drawing import Pen, draw
from rollmill.cli.inspect.event_file import read_lines
from rollmill.cli.inspect.recordings import Recording, folded
from rollmill.cli.inspect.views import SessionView, TraceView, view_of
from rollmill.models import StrategySpec
from rollmill.strategies import builder_registry
from rollmill.testing.simulation import DeliveredEvents, World, deliver
from rollmill.testing.simulation.rng import seeded_rng
from rollmill.testing.simulation.strategies import examples, worlds

SPEC = StrategySpec(strategy="prefix_merging")


def the_recording(world: World, rng: random.Random) -> tuple[DeliveredEvents, Recording]:
    post = deliver([world], SPEC, rng)
    read = read_lines([event.model_dump_json().encode() for event in post.events])
    assert read.problems == ()
    assert read.events == post.events
    (recording,) = folded(read.events)
    return post, recording


def the_view(recording: Recording) -> SessionView:
    return view_of(recording, builder_registry().create(SPEC).build(recording.session()), from_log=False)


def shown(traces: tuple[TraceView, ...]) -> list[tuple[str, int]]:
    turns = [turn for trace in traces for turn in trace.turns]
    here = [(turn.completion_id, turn.choice) for turn in turns]
    return here + [name for turn in turns for name in shown(turn.branches)]


@examples(200, share=10)
@given(worlds(), st.randoms(use_true_random=True))
def test_every_call_is_shown_once_and_the_account_adds_up(world: World, rng: random.Random) -> None:
    post, recording = the_recording(world, rng)
    assert sorted(call.completion_id for call in recording.calls) == sorted(
        call.completion_id for call in post.accepted[world.session_id]
    )
    assert {call.completion_id for call in recording.late} == {
        call.completion_id for call in post.late[world.session_id]
    }
    assert sum("conflict" in note for note in recording.notes) == post.forged
    view = the_view(recording)
    assert view.unaccounted == 0
    names = [*shown(view.traces), *((item.completion_id, item.choice) for item in view.left_out)]
    replies = [(call.completion_id, item.index) for call in recording.calls for item in call.choices]
    silent = [(call.completion_id, 0) for call in (*recording.calls, *recording.late) if not call.choices]
    late = [(call.completion_id, 0) for call in recording.late if call.choices]
    assert sorted(names) == sorted([*replies, *silent, *late])


@examples(100, share=20)
@given(worlds(), st.integers(30, 200))
def test_anything_can_be_drawn(world: World, width: int) -> None:
    _, recording = the_recording(world, seeded_rng(width))
    view, out = the_view(recording), io.StringIO()
    Console(file=out, width=width, highlight=False).print(draw(view, Pen()))
    drawing = out.getvalue()
    assert all(len(line) <= width for line in drawing.splitlines())
    assert f"trace {view.traces_in_all} of {view.traces_in_all}" in drawing or width < 100 or not view.traces
    assert json_line(view).startswith('{"session_id":"s1"')
