"""A simulated world: agents call the model in turn, and every call becomes a record."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rollmill.models import CompletionRecord, PolicyVersion
from rollmill.testing.samples.sessions import Message, assistant, user
from rollmill.testing.simulation.engine import SampledReply, reply_to
from rollmill.testing.simulation.probabilities import Probabilities
from rollmill.testing.simulation.recording import CallContext, record_of
from rollmill.testing.simulation.rng import chance, seeded_rng
from rollmill.testing.simulation.template import Template, parse, tool_call

LETTERS = "abcdef"


@dataclass(frozen=True)
class ConversationState:
    """The state of a conversation: what its next call sends."""

    agent: int
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    partial_reply: tuple[int, ...] = ()
    """A truncated reply that the next call continues: the client sends ids, and no messages."""


@dataclass
class World:
    """``records``: captured, in the order of the calls. ``served``: by completion id, the prompts the model got."""

    probabilities: Probabilities
    template: Template
    session_id: str = "s1"
    records: list[CompletionRecord] = field(default_factory=list)
    served: dict[str, list[int]] = field(default_factory=dict)
    conversations: list[ConversationState] = field(default_factory=list)
    called: list[ConversationState] = field(default_factory=list)
    """The states that calls were made from."""
    version: PolicyVersion = field(default_factory=PolicyVersion)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How hypothesis shows a world."""
        printer.text("\n".join([f"World of {self.session_id}, {self.template}", *map(describe_record, self.records)]))

    def step(self, rng: random.Random) -> None:
        """One call of one agent."""
        if chance(rng, self.probabilities.bumps):
            self.version = PolicyVersion(self.version.epoch, self.version.version + 1)
        state = self._changed(self._next_conversation(rng), rng)
        prompt = [*self.template.prompt(state.messages, state.tools), *state.partial_reply]
        replies = [reply_to(self.template, self.probabilities, rng) for _ in range(_choices(self.probabilities, rng))]
        call = CallContext(self.session_id, len(self.records), self.version, self.probabilities)
        record = record_of(call, prompt, None if state.partial_reply else state.messages, state.tools, replies, rng)
        self.records.append(record)
        self.served[record.completion_id] = prompt
        self.called.append(state)
        self.conversations += [self._after(state, reply, rng) for reply in replies]

    def _next_conversation(self, rng: random.Random) -> ConversationState:
        probabilities = self.probabilities
        if not self.conversations or chance(rng, probabilities.starts):
            return self._new_conversation(rng)
        if chance(rng, probabilities.retries):
            return rng.choice(self.called[-4:])
        if chance(rng, probabilities.forks):
            return rng.choice(self.conversations)
        latest = {state.agent: state for state in self.conversations}
        return rng.choice(list(latest.values())) if chance(rng, probabilities.switches) else self.conversations[-1]

    def _new_conversation(self, rng: random.Random) -> ConversationState:
        system = {"role": "system", "content": random_text(rng, 1, 2)}
        first = () if chance(rng, 0.5) else (system,)
        agent = len({state.agent for state in self.conversations})
        return ConversationState(agent, (*first, user(random_text(rng, 1, 3))), tuple(_tools(rng)))

    def _changed(self, state: ConversationState, rng: random.Random) -> ConversationState:
        if state.partial_reply:
            return state
        if chance(rng, self.probabilities.compacts):
            return replace(state, messages=(user(random_text(rng, 2, 4)),))
        if chance(rng, self.probabilities.changes):
            return replace(state, tools=tuple(_tools(rng)))
        if chance(rng, self.probabilities.changes):
            rest = [item for item in state.messages if item["role"] != "system"]
            return replace(state, messages=({"role": "system", "content": random_text(rng, 1, 2)}, *rest))
        return state

    def _after(self, state: ConversationState, reply: SampledReply, rng: random.Random) -> ConversationState:
        """The state after a reply: the reply as the client sends it back, and the answer of the user or the tools."""
        whole = (*state.partial_reply, *reply.body)
        if reply.finish == "length" and chance(rng, self.probabilities.continues):
            return replace(state, partial_reply=whole)
        message = parse(whole)
        sent = edited_reply(message, rng) if chance(rng, self.probabilities.edits) else message
        answers = [{"role": "tool", "content": random_text(rng, 0, 2)} for _ in sent.get("tool_calls", ())]
        return replace(
            state, messages=(*state.messages, sent, *(answers or [user(random_text(rng, 0, 3))])), partial_reply=()
        )


def world_of(steps: Sequence[int], probabilities: Probabilities, *, session_id: str = "s1", seed: int = 0) -> World:
    """The world in which each number of ``steps`` determines one call; ``seed`` determines the template."""
    rng = seeded_rng(seed)
    flags = [chance(rng, probabilities.odd_template) for _ in fields(Template)]
    world = World(probabilities, Template(*flags), session_id)
    for step in steps:
        world.step(random.Random(step))  # noqa: S311  # a simulation, no secret
    return world


def some_world(probabilities: Probabilities, seed: int, calls: int) -> World:
    """A world of ``calls`` calls, all determined by one number."""
    rng = seeded_rng(seed)
    return world_of([rng.randrange(2**20) for _ in range(calls)], probabilities, seed=seed)


def random_text(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))


def edited_reply(message: Message, rng: random.Random) -> Message:
    """A reply changed in one of the ways in which clients change them."""
    way = rng.choice(("text", "cut", "thought", "arguments", "role"))
    if way == "thought":
        return {name: item for name, item in message.items() if name != "reasoning_content"}
    if way == "arguments" and message.get("tool_calls"):
        return {
            **message,
            "tool_calls": [tool_call(random_text(rng, 1, 2), random_text(rng, 1, 3)) for _ in message["tool_calls"]],
        }
    if way == "cut":
        return {**message, "content": message["content"][:-1]}
    if way == "role":
        return assistant(random_text(rng, 1, 3))
    return {**message, "content": message["content"] + random_text(rng, 0, 2)}


def _tools(rng: random.Random) -> list[Message]:
    names = [random_text(rng, 1, 2) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [{"type": "function", "function": {"name": name}} for name in names]


def _choices(probabilities: Probabilities, rng: random.Random) -> int:
    return rng.randint(2, 3) if chance(rng, probabilities.many) else 1


def describe_record(record: CompletionRecord) -> str:
    """A record as one line: the prompt's ids, and for each reply its ids, finish reason, stop reason and message."""
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
