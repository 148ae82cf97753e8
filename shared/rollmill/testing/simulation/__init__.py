"""A small simulated chat world: agents that talk to a model through a template and a toy tokenizer.

What comes in: numbers, one per step, and the `Probabilities` of those who live there. What comes out: the completion
records of a session, as capture would write them, with the truth beside them. Everything that happens to records in
the field happens here: several token forms of one text (so that templates re-tokenise replies), edited replies,
tools, forks, sub-agents, retries, best of n, compaction, stripped thinking, missing ids and log-probs, replies ended
by length or by a stop string, failed and auxiliary calls, and policies whose version changes between and within
calls. `deliver` makes a topic of sessions: interleaved, shuffled, with duplicates, conflicts and latecomers.

The same numbers give the same world, and leaving a number out leaves a step out, so that a failing example shrinks.
"""

from rollmill.testing.simulation.delivery import Post, deliver
from rollmill.testing.simulation.probabilities import HABITS, Probabilities
from rollmill.testing.simulation.template import Template
from rollmill.testing.simulation.tokens import END, decode, encode
from rollmill.testing.simulation.world import World, some_world, world_of

__all__ = [
    "END",
    "HABITS",
    "Post",
    "Probabilities",
    "Template",
    "World",
    "decode",
    "deliver",
    "encode",
    "some_world",
    "world_of",
]
