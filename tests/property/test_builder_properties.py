"""Properties (a) to (f) of a builder, and what follows from them, over the sessions of a simulated chat world.

`rollmill.testing.simulation` has forks, retries, best of n, compaction, drift, edits, missing ids, failed and auxiliary
calls, and versions that change. ``make fuzz`` tries 50,000 new ones.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.codec import decode as decoded
from rollmill.codec import encode as encoded
from rollmill.models import CompletionRecord, SampledChoice, Trace, TraceTurn, Trajectory, expand
from rollmill.models.sampled_tokens import captured_units
from rollmill.testing.samples.sessions import session_of
from rollmill.testing.simulation import END, PROFILES, World, decode, some_world, world_of
from rollmill.testing.simulation.strategies import examples, worlds
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.merging.sampled_calls import exclusion_reason, untrained_reason
from rollmill_builder.sessions.token_accounting import account_tokens

Name = tuple[str, int]
"""A reply: completion id and choice."""

CONFIGS: list[dict[str, Any]] = [
    {},
    {"end_of_turn_token_id": END},
    {"on_drift": "fork"},
    {"on_drift": "fork_over_n", "drift_tokens": 1},
    {"siblings": "exclude"},
    {"tokenizer": "rollmill.testing.simulation:decode", "end_of_turn_token_id": END},
    {"on_scaffold": "merge"},
    {"max_trace_tokens": 30, "over_long": "cut"},
    {"max_trace_tokens": 30, "over_long": "split"},
    {"max_trace_tokens": 30, "over_long": "exclude"},
]
SESSIONS, FEWER_SESSIONS = examples(2000), examples(500, share=4)

CHOSEN = {"sibling", "over_long", "retried"}
"""Reasons by which a configuration leaves out replies that could be trained."""


@dataclass
class Case:
    """A session and what the builder made of it."""

    world: World
    config: dict[str, Any]

    @cached_property
    def built(self) -> Trajectory:
        return PrefixMergingBuilder(**self.config).build(session_of(*self.world.records))

    @cached_property
    def records(self) -> dict[str, CompletionRecord]:
        return {record.completion_id: record for record in self.world.records}

    @property
    def turns(self) -> list[tuple[Trace, TraceTurn]]:
        return [(trace, turn) for trace in self.built.traces for turn in trace.turns]

    def choice(self, name: Name) -> SampledChoice:
        (item,) = [item for item in self.records[name[0]].choices if item.index == name[1]]
        return item

    def ids(self, name: Name) -> list[int]:
        found = self.choice(name).token_ids
        assert found is not None
        return [int(token) for token in found]

    @cached_property
    def trainable(self) -> set[Name]:
        """Replies that the records allow to train."""
        return {
            (record.completion_id, item.index)
            for record in self.world.records
            for item in record.choices
            if exclusion_reason(record, item) is None and untrained_reason(item) is None
        }

    @cached_property
    def excluded(self) -> dict[Name, set[str]]:
        found: dict[Name, set[str]] = {}
        for item in self.built.excluded:
            for unit in item.units:
                found.setdefault((unit.completion_id, unit.choice), set()).add(item.reason)
        return found


def name_of(turn: TraceTurn) -> Name:
    return turn.completion_id, turn.choice


cases = st.builds(Case, worlds(), st.sampled_from(CONFIGS))


def a_every_accepted_reply_is_trained_once_and_whole(case: Case) -> None:
    accepted = {name for name in case.trainable if not case.excluded.get(name, set()) & CHOSEN}
    trained = Counter(name_of(turn) for _, turn in case.turns if turn.trained)
    assert trained == Counter(accepted)
    assert case.built.trained_tokens == sum(len(case.ids(name)) for name in accepted)


def b_masked_runs_are_exactly_the_raw_replies_in_order(case: Case) -> None:
    for trace in case.built.traces:
        raw = [token for turn in trace.turns if turn.trained for token in case.ids(name_of(turn))]
        assert trace.response_ids[trace.loss_mask == 1].tolist() == raw
        expected = np.zeros(len(trace.response_ids), dtype=np.uint8)
        for turn in trace.turns:
            assert trace.response_ids[turn.start : turn.stop].tolist() == case.ids(name_of(turn))
            expected[turn.start : turn.stop] = turn.trained
        assert trace.loss_mask.tolist() == expected.tolist()
        assert [turn.start for turn in trace.turns] == sorted(turn.start for turn in trace.turns)


def d_what_stands_before_a_reply_decodes_to_the_prompt_it_was_served(case: Case) -> None:
    # Without a tokenizer nothing shows that a template writes another text than the messages hold.
    deceived = not case.world.template.faithful and "tokenizer" not in case.config
    for trace in case.built.traces:
        # Merged scaffolds stay in the trace though the next prompt did not hold them: the configuration asks for it.
        excused = deceived or trace.metadata.get("scaffolds")
        dropped = case.world.served[trace.turns[0].completion_id][: trace.metadata.get("context_dropped", 0)]
        exact = True
        for turn in trace.turns:
            context = [*dropped, *trace.prompt_ids.tolist(), *trace.response_ids[: turn.start].tolist()]
            served = case.world.served[turn.completion_id]
            assert decode(context) == decode(served) or excused
            assert not exact or context == served
            exact = exact and turn.context_exact


def e_accepted_and_excluded_records_are_all_records(case: Case) -> None:
    kept = {name_of(turn) for _, turn in case.turns if turn.trained}
    assert not kept & set(case.excluded)
    assert all(len(reasons) == 1 for reasons in case.excluded.values())
    accounted = {name[0] for name in kept | set(case.excluded)}
    holding = {record.completion_id for record in case.world.records if captured_units(record)}
    assert accounted == holding
    assert case.built.metadata["records"] == len(case.world.records)


def no_trace_is_longer_than_configured(case: Case) -> None:
    most = case.config.get("max_trace_tokens")
    assert most is None or all(len(item.prompt_ids) + len(item.response_ids) <= most for item in case.built.traces)


def a_call_that_goes_on_from_a_changed_reply_is_no_fork(case: Case) -> None:
    """A fork goes on from the last call with a prompt that its own begins with."""
    if {"on_scaffold", "max_trace_tokens"} & set(case.config):
        return  # merged prompts do not begin alike, and calls that a limit left out are not in view
    for trace in case.built.traces:
        if trace.metadata["break_reason"] == "fork":
            served = case.world.served[trace.turns[0].completion_id]
            begun = [case.world.served[turn.completion_id] for _, turn in case.turns]
            longest = max((len(item) for item in begun if served[: len(item)] == item and item != served), default=0)
            assert len(case.world.served[trace.metadata["parent"]]) == longest


def f_arrays_have_one_length_and_untrained_tokens_no_logprob(case: Case) -> None:
    for trace in case.built.traces:
        count = len(trace.response_ids)
        logprobs = np.zeros(count) if trace.response_logprobs is None else trace.response_logprobs
        assert count == len(trace.loss_mask) == len(logprobs) == sum(run.length for run in trace.versions)
        assert not logprobs[trace.loss_mask == 0].any()
        for turn in trace.turns:
            sampled = case.choice(name_of(turn)).logprobs
            if turn.trained:
                assert sampled is not None
                assert logprobs[turn.start : turn.stop].tolist() == sampled.tolist()


def every_captured_token_is_trained_or_excluded_exactly_once(case: Case) -> None:
    seen: Counter[tuple[str, int, int]] = Counter()
    for unit in [*case.built.manifest.units, *(unit for item in case.built.excluded for unit in item.units)]:
        seen.update((unit.completion_id, unit.choice, token) for token in range(unit.start, unit.stop))
    captured = [unit for record in case.world.records for unit in captured_units(record)]
    assert seen == Counter(
        (unit.completion_id, unit.choice, t) for unit in captured for t in range(unit.start, unit.stop)
    )
    assert account_tokens(session_of(*case.world.records), case.built) == case.built


def versions_are_the_records_own_at_every_token(case: Case) -> None:
    for trace in case.built.traces:
        expected = np.full((len(trace.response_ids), 2), -1, dtype=np.int32)
        for turn in trace.turns:
            if turn.trained:
                versions = case.records[turn.completion_id].versions_of(case.choice(name_of(turn)))
                expected[turn.start : turn.stop] = expand(versions)
        assert expand(trace.versions).tolist() == expected.tolist()


def a_reply_follows_the_longest_prompt_and_reply_that_its_prompt_begins_with(case: Case) -> None:
    """Or it is repaired across a turn that is longer still; and where no call is a prefix, it follows none."""
    usable = [(turn, [*case.world.served[turn.completion_id], *case.ids(name_of(turn))]) for _, turn in case.turns]
    for trace in case.built.traces:
        for before, turn in zip((None, *trace.turns), trace.turns, strict=False):
            served = case.world.served[turn.completion_id]
            longest = max((whole for _, whole in usable if served[: len(whole)] == whole), key=len, default=[])
            if before is None:
                assert not longest or trace.metadata["parent"] is not None
            elif before.context_exact:
                assert [*case.world.served[before.completion_id], *case.ids(name_of(before))] == longest
            else:
                assert len(case.world.served[before.completion_id]) >= len(longest)


def branches_have_names_and_parents_that_exist(case: Case) -> None:
    branches = [trace.metadata["branch"] for trace in case.built.traces]
    assert len(set(branches)) == len(branches)
    assert [trace.metadata["break_reason"] for trace in case.built.traces].count(None) <= 1
    branch_of_reply = {name_of(turn): trace.metadata["branch"] for trace, turn in case.turns}
    for trace in case.built.traces:
        if trace.metadata["parent"] is not None:
            parent = trace.metadata["parent"], trace.metadata["parent_choice"]
            assert branch_of_reply.get(parent) == trace.metadata["parent_branch"]
            assert parent in branch_of_reply or case.excluded[parent]


PROPERTIES = (
    a_every_accepted_reply_is_trained_once_and_whole,
    b_masked_runs_are_exactly_the_raw_replies_in_order,
    d_what_stands_before_a_reply_decodes_to_the_prompt_it_was_served,
    e_accepted_and_excluded_records_are_all_records,
    f_arrays_have_one_length_and_untrained_tokens_no_logprob,
    every_captured_token_is_trained_or_excluded_exactly_once,
    versions_are_the_records_own_at_every_token,
    a_reply_follows_the_longest_prompt_and_reply_that_its_prompt_begins_with,
    branches_have_names_and_parents_that_exist,
    a_call_that_goes_on_from_a_changed_reply_is_no_fork,
    no_trace_is_longer_than_configured,
)


@SESSIONS
@given(cases)
def test_properties_of_every_session(case: Case) -> None:
    """One session is generated for all properties; (c) has more than one, and is checked below."""
    for holds in PROPERTIES:
        holds(case)


@SESSIONS
@given(cases, st.randoms(use_true_random=False))
def test_c_the_result_does_not_depend_on_the_order_of_input(case: Case, rng: random.Random) -> None:
    shuffled = rng.sample(case.world.records, len(case.world.records))
    again = PrefixMergingBuilder(**case.config).build(session_of(*shuffled))
    assert encoded(again) == encoded(case.built)
    assert decoded(Trajectory, encoded(again)) == again


@FEWER_SESSIONS
@given(worlds())
def test_per_request_trains_the_same_tokens(world: World) -> None:
    merged = PrefixMergingBuilder().build(session_of(*world.records))
    apart = PerRequestBuilder().build(session_of(*world.records))
    assert sorted(merged.manifest.units) == sorted(apart.manifest.units)
    assert merged.excluded == apart.excluded


@FEWER_SESSIONS
@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=20))
def test_an_agent_without_trouble_becomes_one_trace(steps: list[int]) -> None:
    world = world_of(steps, PROFILES["calm"])
    built = PrefixMergingBuilder().build(session_of(*world.records))
    (trace,) = built.traces
    assert len(trace.turns) == len(world.records)
    assert all(turn.context_exact for turn in trace.turns)
    assert built.excluded == ()


REASONS = {
    "compaction",
    "end_of_turn_ambiguous",
    "end_of_turn_missing",
    "end_of_turn_unknown",
    "fork",
    "no_end_of_turn",
    "policy_changed",
    "prefix_rewritten",
    "reasoning_stripped",
    "reply_differs",
    "reply_unverified",
    "scaffold_inserted",
    "scaffold_removed",
    "sibling",
    "stop_string",
    "sub_agent",
    "system_changed",
    "tool_arguments",
    "tools_changed",
}
EXCLUSIONS = {
    "aux",
    "client_gone",
    "error",
    "ids_differ_from_usage",
    "incomplete",
    "logprob_unknown",
    "no_ids",
    "no_logprobs",
    "no_prompt_ids",
}


@pytest.fixture(scope="module")
def many() -> list[Trajectory]:
    """Trajectories of fixed worlds of all habits."""
    found = []
    for habits in PROFILES.values():
        for seed in range(250):
            world = some_world(habits, seed, 12)
            found.append(PrefixMergingBuilder().build(session_of(*world.records)))
    return found


def test_the_worlds_have_every_break_and_every_exclusion(many: list[Trajectory]) -> None:
    """The other properties check little where their worlds lack a case."""
    breaks = {trace.metadata["break_reason"] for built in many for trace in built.traces}
    assert breaks >= REASONS
    assert {item.reason for built in many for item in built.excluded} >= EXCLUSIONS
    assert sum(built.metadata["drift"] for built in many) > 100


def test_every_trajectory_reads_back_as_it_was_written(many: list[Trajectory]) -> None:
    assert all(decoded(Trajectory, encoded(built)) == built for built in many)
