"""A simulation of agents that call a model through a chat template and a toy tokenizer.

Input: numbers, one per step, and `Probabilities`. Output: the completion records of a session, as capture would write
them, with the true prompts beside them. Everything that happens to records in the field happens here: several token
forms of one text (so that templates re-tokenise replies), edited replies, tools, forks, sub-agents, retries, best of n,
compaction, stripped thinking, missing ids and log-probs, replies ended by length or by a stop string, failed and
auxiliary calls, and policy versions that change between and within calls.

`world` runs the agents; `engine` samples replies with `template` and `tokens`; `recording` makes the record of a call;
`delivery` makes a topic of sessions: interleaved, shuffled, with duplicates, conflicts and late calls; `strategies`
are for hypothesis; `rng` and `probabilities` decide. The same numbers give the same world, and leaving a number out
leaves a step out, so that a failing example shrinks.
"""

from rollmill.testing.simulation.delivery import DeliveredEvents, deliver
from rollmill.testing.simulation.probabilities import PROFILES, Probabilities
from rollmill.testing.simulation.template import Template
from rollmill.testing.simulation.tokens import END, decode, encode
from rollmill.testing.simulation.world import World, some_world, world_of

__all__ = [
    "END",
    "PROFILES",
    "DeliveredEvents",
    "Probabilities",
    "Template",
    "World",
    "decode",
    "deliver",
    "encode",
    "some_world",
    "world_of",
]
