"""Hypothesis strategies for worlds. One number fewer is one call fewer, so that failing examples shrink."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from rollmill.testing.simulation.probabilities import PROFILES
from rollmill.testing.simulation.world import World, world_of

MOST_CALLS = 12


@st.composite
def worlds(draw: st.DrawFn, most: int = MOST_CALLS, session_id: str = "s1") -> World:
    """Worlds of up to ``most`` calls, of all profiles."""
    probabilities = PROFILES[draw(st.sampled_from(sorted(PROFILES)))]
    steps = draw(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=most))
    return world_of(steps, probabilities, session_id=session_id, seed=draw(st.integers(0, 2**10 - 1)))


def examples(repeatable: int, share: int = 1) -> settings:
    """Settings: ``repeatable`` examples where every run has the same ones, as in CI; else the profile's / ``share``."""
    profile = settings()
    return settings(max_examples=repeatable if profile.derandomize else profile.max_examples // share)
