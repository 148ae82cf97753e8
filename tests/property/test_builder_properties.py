"""Properties (a) to (f) over generated sessions: forks, retries, compaction, drift, missing ids, any order.

The world is a toy engine: replies are digits 10 to 15, each of which also exists in a second form (20 to 25) with the
same text; 9 ends a turn, 8 follows it by the template. Agents, which branch and retry, talk to it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.codec import decode, encode
from rollmill.models import CallKind, CallStatus, CompletionRecord, Trajectory
from rollmill.testing.sessions import assistant, choice, completion, session_of, user
from rollmill_builder.accounting import settle
from rollmill_builder.calls import captured_units, refusal
from rollmill_builder.per_request import PerRequestBuilder
from rollmill_builder.prefix_merging import PrefixMergingBuilder

END, NEWLINE = 9, 8
CONFIGS: list[dict[str, Any]] = [
    {},
    {"end_of_turn_token_id": END},
    {"on_drift": "fork"},
    {"on_drift": "fork_over_n", "drift_tokens": 1},
    {"siblings": "exclude"},
]


def text(ids: Any) -> str:
    """Decode: both forms of a digit are the same text."""
    return "".join(chr(ord("a") + int(token) % 10) if 10 <= int(token) < 30 else f"<{int(token)}>" for token in ids)


@dataclass
class Node:
    """A conversation: its tokens as the template renders them, and its messages."""

    ids: list[int]
    messages: list[dict[str, Any]]


@dataclass
class World:
    rng: random.Random
    records: list[CompletionRecord] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def start(self) -> Node:
        words = [self.rng.randint(30, 33) for _ in range(self.rng.randint(1, 4))]
        return Node([1, *words, 7], [user(text(words))])

    def step(self) -> None:
        fresh = not self.nodes or self.rng.random() < 0.15
        node = self.start() if fresh else self.rng.choice(self.nodes[-4:])
        for _ in range(2 if self.rng.random() < 0.15 else 1):
            self.nodes.append(self.call(node))

    def call(self, node: Node) -> Node:
        rng = self.rng
        body = [rng.randint(10, 15) for _ in range(rng.randint(0, 4))]
        ended = rng.random() < 0.85 or not body
        reply = [*body, END] if ended else body
        self.records.append(self.record(node, reply, "stop" if ended else "length", assistant(text(body))))
        return self.after(node, reply, body)

    def record(self, node: Node, reply: list[int], finish: str, message: dict[str, Any]) -> CompletionRecord:
        rng, number = self.rng, len(self.records)
        ids = None if rng.random() < 0.05 else reply
        logprobs: Any = None if ids is None or rng.random() < 0.1 else [-rng.random() for _ in reply]
        choices = [choice(ids, logprobs=logprobs, finish=finish, message=message)]
        if rng.random() < 0.05:
            choices.append(choice([14, 15, END], index=1, message=assistant(text([14, 15]))))
        return completion(
            f"c{number:03d}",
            None if rng.random() < 0.05 else node.ids,
            choices,
            at=1.0 + rng.randint(0, 3) + number,
            messages=node.messages,
            kind=CallKind.AUX if rng.random() < 0.05 else CallKind.AGENT,
            status=CallStatus.CLIENT_GONE if rng.random() < 0.05 else CallStatus.OK,
            usage_completion_tokens=len(reply),
        )

    def after(self, node: Node, reply: list[int], body: list[int]) -> Node:
        """The next turn: the reply as sampled, in its other form (drift), or edited; then the user speaks."""
        rng, dice = self.rng, self.rng.random()
        copy = list(body)
        if dice < 0.25:
            copy = [token + 10 if rng.random() < 0.5 else token for token in body]
        elif dice < 0.35:
            copy = [16, *body[1:]]
        end = [] if rng.random() < 0.03 else [END]
        words = [rng.randint(30, 33) for _ in range(rng.randint(1, 3))]
        ids = [*node.ids, *copy, *end, NEWLINE, *words, 7]
        history = [*node.messages, assistant(text(copy)), user(text(words))]
        assert len(reply) >= len(body)
        return Node(ids, history)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World(draw(st.randoms(use_true_random=True)))
    for _ in range(draw(st.integers(1, 14))):
        world.step()
    return world


SLOW = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def replies(world: World) -> dict[tuple[str, int], list[int]]:
    """Sampled ids of every reply that holds ids, by (completion, choice)."""
    return {
        (record.completion_id, item.index): item.token_ids.tolist()
        for record in world.records
        for item in record.choices
        if item.token_ids is not None and len(item.token_ids)
    }


def captured(world: World) -> Counter[tuple[str, int]]:
    units = [unit for record in world.records for unit in captured_units(record)]
    return Counter({(unit.completion_id, unit.choice): unit.stop for unit in units})


@SLOW
@given(worlds(), st.sampled_from(CONFIGS))
def test_every_token_is_trained_once_or_excluded_with_a_reason(world: World, config: dict[str, Any]) -> None:
    trajectory = PrefixMergingBuilder(**config).build(session_of(*world.records))
    seen: Counter[tuple[str, int, int]] = Counter()
    units = [*trajectory.manifest.units, *(unit for item in trajectory.excluded for unit in item.units)]
    for unit in units:
        seen.update((unit.completion_id, unit.choice, token) for token in range(unit.start, unit.stop))
    expected = {(*name, token) for name, count in captured(world).items() for token in range(count)}
    assert set(seen) == expected
    assert set(seen.values()) <= {1}
    assert settle(session_of(*world.records), trajectory) == trajectory


@SLOW
@given(worlds(), st.sampled_from(CONFIGS))
def test_masked_runs_are_the_raw_replies_and_arrays_agree(world: World, config: dict[str, Any]) -> None:
    sampled = replies(world)
    for trace in PrefixMergingBuilder(**config).build(session_of(*world.records)).traces:
        expected = np.zeros(len(trace.response_ids), dtype=np.uint8)
        for turn in trace.turns:
            span = trace.response_ids[turn.start : turn.stop]
            assert span.tolist() == sampled[turn.completion_id, turn.choice]
            expected[turn.start : turn.stop] = turn.trained
        assert trace.loss_mask.tolist() == expected.tolist()
        logprobs = trace.response_logprobs
        assert logprobs is None or not logprobs[trace.loss_mask == 0].any()
        assert sum(run.length for run in trace.versions) == len(trace.response_ids) == len(trace.loss_mask)


@SLOW
@given(worlds(), st.sampled_from(CONFIGS), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(world: World, config: dict[str, Any], rng: random.Random) -> None:
    shuffled = list(world.records)
    rng.shuffle(shuffled)
    first = PrefixMergingBuilder(**config).build(session_of(*world.records))
    again = PrefixMergingBuilder(**config).build(session_of(*shuffled))
    assert encode(first) == encode(again)
    assert decode(Trajectory, encode(first)) == first


@SLOW
@given(worlds(), st.sampled_from(CONFIGS))
def test_what_stands_before_a_reply_decodes_to_the_prompt_it_was_served(world: World, config: dict[str, Any]) -> None:
    prompts = {record.completion_id: record.prompt_ids for record in world.records}
    for trace in PrefixMergingBuilder(**config).build(session_of(*world.records)).traces:
        exact = True
        for turn in trace.turns:
            context = [*trace.prompt_ids.tolist(), *trace.response_ids[: turn.start].tolist()]
            served = prompts[turn.completion_id]
            assert served is not None
            assert text(context) == text(served)
            assert not exact or context == served.tolist()
            exact = exact and turn.context_exact


@SLOW
@given(worlds(), st.sampled_from(CONFIGS))
def test_every_reply_is_in_one_trace_or_refused(world: World, config: dict[str, Any]) -> None:
    trajectory = PrefixMergingBuilder(**config).build(session_of(*world.records))
    kept = Counter((turn.completion_id, turn.choice) for trace in trajectory.traces for turn in trace.turns)
    left_out = {
        (unit.completion_id, unit.choice)
        for item in trajectory.excluded
        if item.reason == "sibling"
        for unit in item.units
    }
    usable = {
        (record.completion_id, item.index)
        for record in world.records
        for item in record.choices
        if refusal(record, item) is None
    }
    assert set(kept) | left_out == usable
    assert not set(kept) & left_out
    assert set(kept.values()) <= {1}
    assert len({trace.metadata["branch"] for trace in trajectory.traces}) == len(trajectory.traces)


@SLOW
@given(worlds())
def test_per_request_trains_the_same_tokens(world: World) -> None:
    merged = PrefixMergingBuilder().build(session_of(*world.records))
    apart = PerRequestBuilder().build(session_of(*world.records))
    assert sorted(merged.manifest.units) == sorted(apart.manifest.units)
    assert merged.excluded == apart.excluded
