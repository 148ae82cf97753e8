"""The probability of each thing that can happen in a world, and named profiles of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Probabilities:
    """Per call, unless noted otherwise."""

    drifts: float = 0.0
    """The policy samples another token form than the tokenizer's own."""
    odd_template: float = 0.0
    """Each flag of the template, once per world."""
    thinks: float = 0.0
    calls_tools: float = 0.0
    samples_end_inside: float = 0.0
    """An end-of-turn token within a reply, as with ``ignore_eos``."""
    truncates: float = 0.0
    stop_strings: float = 0.0
    hides_stops: float = 0.0
    """The engine does not report that a stop string ended the reply."""
    edits: float = 0.0
    """The client changes a reply before it sends it back."""
    starts: float = 0.0
    """Another agent begins."""
    switches: float = 0.0
    """An agent other than the last one continues."""
    forks: float = 0.0
    retries: float = 0.0
    many: float = 0.0
    """More than one choice."""
    compacts: float = 0.0
    changes: float = 0.0
    """Tools or system prompt change."""
    continues: float = 0.0
    """A truncated reply is continued token by token, instead of being sent back as a message."""
    loses: float = 0.0
    """Each of ids, prompt ids, log-probs and messages is missing."""
    fails: float = 0.0
    aux: float = 0.0
    bumps: float = 0.0
    """The policy's version increases before the call, or within it."""
    other_policy: float = 0.0
    odd_clock: float = 0.0
    """Times are missing, equal or behind."""


_SAMPLING = {"drifts": 0.3, "thinks": 0.1, "calls_tools": 0.2, "truncates": 0.1, "bumps": 0.2}
_AGENTS = {
    "starts": 0.1,
    "switches": 0.3,
    "forks": 0.15,
    "retries": 0.1,
    "many": 0.1,
    "compacts": 0.05,
    "changes": 0.05,
}
_TROUBLE = {"edits": 0.1, "loses": 0.05, "fails": 0.08, "aux": 0.08, "odd_clock": 0.1, "other_policy": 0.03}
_ODDITIES = {
    "stop_strings": 0.1,
    "hides_stops": 0.2,
    "samples_end_inside": 0.05,
    "odd_template": 0.15,
    "continues": 0.3,
}

PROFILES: dict[str, Probabilities] = {
    "calm": Probabilities(calls_tools=0.3, bumps=0.2),
    "drifting": Probabilities(**{**_SAMPLING, "drifts": 0.6, "edits": 0.2, "truncates": 0.2}),
    "branching": Probabilities(**_SAMPLING, **{name: 2 * value for name, value in _AGENTS.items()}),
    "troubled": Probabilities(**_SAMPLING, **_TROUBLE),
    "thinking": Probabilities(**{**_SAMPLING, "thinks": 0.6, "calls_tools": 0.5}, odd_template=0.3),
    "odd": Probabilities(**_SAMPLING, **{name: 2 * value for name, value in _ODDITIES.items()}),
    "wild": Probabilities(**_SAMPLING, **_AGENTS, **_TROUBLE, **_ODDITIES),
}
"""From one agent without any trouble (``calm``) to everything at once (``wild``)."""
