"""The world itself: agents take turns at the model, and every call becomes a record."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rollmill.models import CompletionRecord, PolicyVersion
from rollmill.testing.samples.sessions import Message, assistant, user
from rollmill.testing.simulation.engine import Reply, reply_to
from rollmill.testing.simulation.probabilities import Probabilities
from rollmill.testing.simulation.recording import record_of
from rollmill.testing.simulation.rng import chance, dice
from rollmill.testing.simulation.template import Template, parse, tool_call

LETTERS = "abcdef"


@dataclass(frozen=True)
class Spot:
    """Where a conversation stands: what the next call would send."""

    agent: int
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    begun: tuple[int, ...] = ()
    """A reply that was cut off, and that the next call goes on with: the client sends ids, and no messages."""


@dataclass
class World:
    """``records`` are what was captured, in the order of the calls; ``served`` the prompts as they really were."""

    habits: Probabilities
    template: Template
    session_id: str = "s1"
    records: list[CompletionRecord] = field(default_factory=list)
    served: dict[str, list[int]] = field(default_factory=dict)
    spots: list[Spot] = field(default_factory=list)
    asked: list[Spot] = field(default_factory=list)
    """The spots that calls were made from."""
    version: PolicyVersion = field(default_factory=PolicyVersion)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How hypothesis shows a world."""
        printer.text("\n".join([f"World of {self.session_id}, {self.template}", *map(line, self.records)]))

    def step(self, rng: random.Random) -> None:
        """One call of one agent."""
        if chance(rng, self.habits.bumps):
            self.version = PolicyVersion(self.version.epoch, self.version.version + 1)
        spot = self._changed(self._spot(rng), rng)
        prompt = [*self.template.prompt(spot.messages, spot.tools), *spot.begun]
        replies = [reply_to(self.template, self.habits, rng) for _ in range(_choices(self.habits, rng))]
        record = record_of(self, prompt, None if spot.begun else spot.messages, spot.tools, replies, rng)
        self.records.append(record)
        self.served[record.completion_id] = prompt
        self.asked.append(spot)
        self.spots += [self._after(spot, reply, rng) for reply in replies]

    def _spot(self, rng: random.Random) -> Spot:
        habits = self.habits
        if not self.spots or chance(rng, habits.starts):
            return self._beginning(rng)
        if chance(rng, habits.retries):
            return rng.choice(self.asked[-4:])
        if chance(rng, habits.forks):
            return rng.choice(self.spots)
        latest = {spot.agent: spot for spot in self.spots}
        return rng.choice(list(latest.values())) if chance(rng, habits.switches) else self.spots[-1]

    def _beginning(self, rng: random.Random) -> Spot:
        system = {"role": "system", "content": words(rng, 1, 2)}
        first = () if chance(rng, 0.5) else (system,)
        agent = len({spot.agent for spot in self.spots})
        return Spot(agent, (*first, user(words(rng, 1, 3))), tuple(_tools(rng)))

    def _changed(self, spot: Spot, rng: random.Random) -> Spot:
        if spot.begun:
            return spot
        if chance(rng, self.habits.compacts):
            return replace(spot, messages=(user(words(rng, 2, 4)),))
        if chance(rng, self.habits.changes):
            return replace(spot, tools=tuple(_tools(rng)))
        if chance(rng, self.habits.changes):
            rest = [item for item in spot.messages if item["role"] != "system"]
            return replace(spot, messages=({"role": "system", "content": words(rng, 1, 2)}, *rest))
        return spot

    def _after(self, spot: Spot, reply: Reply, rng: random.Random) -> Spot:
        """The reply as it is sent back, and what the user or the tools say to it."""
        whole = (*spot.begun, *reply.body)
        if reply.finish == "length" and chance(rng, self.habits.goes_on):
            return replace(spot, begun=whole)
        message = parse(whole)
        sent = edited(message, rng) if chance(rng, self.habits.edits) else message
        answers = [{"role": "tool", "content": words(rng, 0, 2)} for _ in sent.get("tool_calls", ())]
        return replace(spot, messages=(*spot.messages, sent, *(answers or [user(words(rng, 0, 3))])), begun=())


def world_of(steps: Sequence[int], habits: Probabilities, *, session_id: str = "s1", seed: int = 0) -> World:
    """The world in which each number of ``steps`` decides one call; ``seed`` decides on the template."""
    rng = dice(seed)
    flags = [chance(rng, habits.odd_template) for _ in fields(Template)]
    world = World(habits, Template(*flags), session_id)
    for step in steps:
        world.step(random.Random(step))  # noqa: S311  # play, no secret
    return world


def some_world(habits: Probabilities, seed: int, calls: int) -> World:
    """A world of ``calls`` calls, all decided by one number."""
    rng = dice(seed)
    return world_of([rng.randrange(2**20) for _ in range(calls)], habits, seed=seed)


def words(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))


def edited(message: Message, rng: random.Random) -> Message:
    """Another reply than the model's, in one of the ways of clients."""
    way = rng.choice(("text", "cut", "thought", "arguments", "role"))
    if way == "thought":
        return {name: item for name, item in message.items() if name != "reasoning_content"}
    if way == "arguments" and message.get("tool_calls"):
        return {**message, "tool_calls": [tool_call(words(rng, 1, 2), words(rng, 1, 3)) for _ in message["tool_calls"]]}
    if way == "cut":
        return {**message, "content": message["content"][:-1]}
    if way == "role":
        return assistant(words(rng, 1, 3))
    return {**message, "content": message["content"] + words(rng, 0, 2)}


def _tools(rng: random.Random) -> list[Message]:
    names = [words(rng, 1, 2) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [{"type": "function", "function": {"name": name}} for name in names]


def _choices(habits: Probabilities, rng: random.Random) -> int:
    return rng.randint(2, 3) if chance(rng, habits.many) else 1


def line(record: CompletionRecord) -> str:
    """A record in a line: its prompt's ids, and of each reply ids, end and message."""
    prompt = None if record.prompt_ids is None else record.prompt_ids.tolist()
    replies = [
        (
            None if item.token_ids is None else item.token_ids.tolist(),
            item.finish_reason,
            item.stop_reason,
            item.message,
        )
        for item in record.choices
    ]
    return f"  {record.completion_id} at {record.started_at} {record.status} {record.kind}: {prompt} -> {replies}"
