"""A builder that is stopped at any moment, and restored from its changelog, gives what an undisturbed one gives."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.codec import encode
from rollmill.models import Record, SessionClosed, SessionOpened, SessionSpec
from rollmill.strategies import builder_registry
from rollmill.testing.memory import MemoryTask
from rollmill.testing.sessions import completion
from rollmill.topics import COMPLETIONS, partition_of
from rollmill_builder.handlers import BuilderStage, BuilderState


def task() -> MemoryTask[BuilderState]:
    stage = BuilderStage(registry=builder_registry(), partitions=1, late_window=50.0)
    return MemoryTask(stage, partition=partition_of(b"any", 1))


def events(rng: random.Random) -> list[Any]:
    """Events of a few sessions, interleaved, some of them again, late, or in the wrong order."""
    found: list[Any] = []
    for number in range(rng.randint(1, 4)):
        name, prompt = f"s{number}", [1, number]
        found.append(SessionOpened(session_id=name, spec=SessionSpec(task_id="t"), at=10.0))
        for turn in range(rng.randint(0, 5)):
            found.append(completion(f"c{turn}", prompt, [5, turn, 9], at=20.0 + turn, session_id=name))
            prompt = [*prompt, 5, turn, 9, 3]
        found.append(SessionClosed(session_id=name, at=rng.choice([30.0, 130.0])))
    found += rng.sample(found, min(len(found), 4))
    place = {id(event): index + rng.uniform(-3, 3) for index, event in enumerate(found)}
    return sorted(found, key=lambda event: place[id(event)])


def sent(run: MemoryTask[BuilderState]) -> list[tuple[str, bytes | None]]:
    return [
        (emit.topic.name, encode(emit.value) if isinstance(emit.value, Record) else emit.value) for emit in run.emitted
    ]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 30))
def test_a_restored_builder_goes_on_as_if_nothing_happened(rng: random.Random, stop: int) -> None:
    script = events(rng)
    undisturbed, stopped = task(), task()
    for index, event in enumerate(script):
        if index == stop:
            stopped.state = stopped.restored()
            stopped.stage = task().stage
        undisturbed.feed(COMPLETIONS, event, key=event.session_id)
        stopped.feed(COMPLETIONS, event, key=event.session_id)
        assert dict(stopped.restored().items()) == dict(stopped.state.items())
    assert sent(stopped) == sent(undisturbed)
    assert stopped.changelog == undisturbed.changelog
