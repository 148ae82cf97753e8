"""Hypothesis strategies for worlds. A number less is a call less, so that failing examples become small."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from rollmill.testing.simulation.probabilities import HABITS
from rollmill.testing.simulation.world import World, world_of

MOST_CALLS = 12


@st.composite
def worlds(draw: st.DrawFn, most: int = MOST_CALLS, session_id: str = "s1") -> World:
    """Worlds of up to ``most`` calls, of all habits."""
    habits = HABITS[draw(st.sampled_from(sorted(HABITS)))]
    steps = draw(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=most))
    return world_of(steps, habits, session_id=session_id, seed=draw(st.integers(0, 2**10 - 1)))


def tries(repeatable: int, share: int = 1) -> settings:
    """``repeatable`` examples where they are the same in every run, as in CI; else the profile's by ``share``."""
    profile = settings()
    return settings(max_examples=repeatable if profile.derandomize else profile.max_examples // share)
