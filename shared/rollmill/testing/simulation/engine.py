"""The model server: samples a reply in some token form, and says how it ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rollmill.testing.samples.sessions import Message
from rollmill.testing.simulation import tokens
from rollmill.testing.simulation.probabilities import Probabilities
from rollmill.testing.simulation.rng import chance
from rollmill.testing.simulation.template import Template, body, parse, tool_call

LETTERS = "abcdef "


@dataclass(frozen=True)
class Reply:
    ids: tuple[int, ...]
    body: tuple[int, ...]
    """The ids that the message is made of: without the end of the turn, and what a stop string cut off."""
    finish: str
    stop: str | None = None
    """The stop string that ended it; None: something else did, or the engine does not say."""

    @property
    def message(self) -> Message:
        return parse(self.body)


def reply_to(template: Template, habits: Probabilities, rng: random.Random) -> Reply:
    """A reply of the policy: thought, text, calls of tools."""
    intended = _intended(habits, rng)
    write: Callable[[str], list[int]] = tokens.encode
    if chance(rng, habits.drifts):
        write = lambda text: tokens.sampled(text, rng)  # noqa: E731  # one of two writers
    ids = body(intended, write, thinks=not template.scaffold)
    if ids and chance(rng, habits.samples_end_inside):
        ids.insert(rng.randrange(len(ids)), tokens.END)
    if ids and chance(rng, habits.truncates):
        kept = tuple(ids[: rng.randint(1, len(ids))])
        return Reply(kept, kept, "length")
    if ids and chance(rng, habits.stop_strings):
        return _stopped(ids, habits, rng)
    finish = "tool_calls" if intended.get("tool_calls") else "stop"
    return Reply((*ids, template.end_of(intended)), tuple(ids), finish)


def _intended(habits: Probabilities, rng: random.Random) -> Message:
    message: Message = {"role": "assistant", "content": _words(rng, 0, 5)}
    if chance(rng, habits.thinks):
        message["reasoning_content"] = _words(rng, 1, 12)
    if chance(rng, habits.calls_tools):
        message["tool_calls"] = [tool_call(_words(rng, 1, 2), _words(rng, 0, 3), at) for at in range(rng.randint(1, 2))]
    return message


def _stopped(ids: list[int], habits: Probabilities, rng: random.Random) -> Reply:
    """The text ends before the stop string "g"; the ids may or may not hold it."""
    kept = ids[: rng.randint(0, len(ids))]
    stop = tokens.encode("g")
    shown = kept if chance(rng, 0.5) or not kept else [*kept, *stop]
    return Reply(tuple(shown), tuple(kept), "stop", None if chance(rng, habits.hides_stops) else "g")


def _words(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))
