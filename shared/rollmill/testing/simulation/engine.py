"""The model server: samples a reply in some token form, with its finish reason."""

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
class SampledReply:
    ids: tuple[int, ...]
    body: tuple[int, ...]
    """The ids of the message: without the end-of-turn token and without what a stop string removed."""
    finish: str
    stop: str | None = None
    """The stop string that ended it; None: it ended otherwise, or the engine does not report the string."""

    @property
    def message(self) -> Message:
        return parse(self.body)


def reply_to(template: Template, probabilities: Probabilities, rng: random.Random) -> SampledReply:
    """A reply of the policy: reasoning, text, tool calls."""
    intended = _intended(probabilities, rng)
    write: Callable[[str], list[int]] = tokens.encode
    if chance(rng, probabilities.drifts):
        write = lambda text: tokens.sampled(text, rng)  # noqa: E731  # one of two encoders
    ids = body(intended, write, thinks=not template.scaffold)
    if ids and chance(rng, probabilities.samples_end_inside):
        ids.insert(rng.randrange(len(ids)), tokens.END)
    if ids and chance(rng, probabilities.truncates):
        kept = tuple(ids[: rng.randint(1, len(ids))])
        return SampledReply(kept, kept, "length")
    if ids and chance(rng, probabilities.stop_strings):
        return _stopped(ids, probabilities, rng)
    finish = "tool_calls" if intended.get("tool_calls") else "stop"
    return SampledReply((*ids, template.end_of(intended)), tuple(ids), finish)


def _intended(probabilities: Probabilities, rng: random.Random) -> Message:
    message: Message = {"role": "assistant", "content": _random_text(rng, 0, 5)}
    if chance(rng, probabilities.thinks):
        message["reasoning_content"] = _random_text(rng, 1, 12)
    if chance(rng, probabilities.calls_tools):
        message["tool_calls"] = [
            tool_call(_random_text(rng, 1, 2), _random_text(rng, 0, 3), at) for at in range(rng.randint(1, 2))
        ]
    return message


def _stopped(ids: list[int], probabilities: Probabilities, rng: random.Random) -> SampledReply:
    """The text ends before the stop string "g"; the ids may or may not include it."""
    kept = ids[: rng.randint(0, len(ids))]
    stop = tokens.encode("g")
    shown = kept if chance(rng, 0.5) or not kept else [*kept, *stop]
    return SampledReply(tuple(shown), tuple(kept), "stop", None if chance(rng, probabilities.hides_stops) else "g")


def _random_text(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))
