"""Replies that the client never received: excluded where the records show it, and only there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.models import CallStatus, CompletionRecord, TokenRange, Trajectory
from rollmill.models.sampled_tokens import captured_units
from rollmill.testing.samples.sessions import choice, completion, session_of, user
from rollmill.testing.simulation.strategies import examples, worlds
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.token_accounting import account_tokens

PROMPT, ASK = (1, 2), [user("?")]
FIRST, AGAIN = {"idempotency_key": "k1"}, {"idempotency_key": "k1", "client_retries": "1"}


def built(*records: CompletionRecord, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def one(name: str, reply: tuple[int, ...], at: float, metadata: dict[str, Any], **more: Any) -> CompletionRecord:
    return completion(name, more.pop("prompt", PROMPT), reply, at=at, metadata=metadata, **more)


def names(trajectory: Trajectory) -> list[list[str]]:
    return [[turn.completion_id for turn in trace.turns] for trace in trajectory.traces]


def reasons(trajectory: Trajectory) -> list[str | None]:
    return [trace.metadata["break_reason"] for trace in trajectory.traces]


def excluded(trajectory: Trajectory) -> dict[str, int]:
    return {item.reason: item.tokens for item in trajectory.excluded}


AFTER = one("c2", (7, 9), 3.0, {}, prompt=(1, 2, 6, 9, 3))


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (FIRST, AGAIN),
        (FIRST, FIRST),
        ({}, {"client_retries": "1"}),
        ({"client_retries": "0"}, {"client_retries": 1}),
        ({"idempotency_key": "k1"}, {"client_retries": "2"}),
    ],
)
@pytest.mark.parametrize("siblings", ["keep", "exclude"])
def test_f17_k05_an_unheard_reply_is_excluded_and_the_session_has_one_trace(
    first: dict[str, Any], again: dict[str, Any], siblings: str
) -> None:
    trajectory = built(one("c1", (5, 9), 1.0, first), one("c1b", (6, 9), 2.0, again), AFTER, siblings=siblings)
    assert (names(trajectory), reasons(trajectory)) == ([["c1b", "c2"]], [None])
    assert excluded(trajectory) == {"retried": 2}
    assert trajectory.metadata["left_out"] == {"retried": 1}


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({}, {}),
        ({"client_retries": "0"}, {"client_retries": "0"}),
        ({"idempotency_key": "k1"}, {"idempotency_key": "k2"}),
        ({"idempotency_key": "k1"}, {"idempotency_key": "k2", "client_retries": "1"}),
        ({"client_retries": "1"}, {"client_retries": "1"}),
        ({}, {"client_retries": "-1"}),
        ({}, {"client_retries": "many", "idempotency_key": ["k1"]}),
        ({}, {"client_retries": True}),
        ({}, {"client_retries": "9" * 5000}),
    ],
)
def test_f17_without_evidence_nothing_is_excluded_and_the_first_trace_has_no_break(
    first: dict[str, Any], again: dict[str, Any]
) -> None:
    trajectory = built(one("c1", (5, 9), 1.0, first), one("c1b", (6, 9), 2.0, again), AFTER)
    assert (names(trajectory), excluded(trajectory)) == ([["c1"], ["c1b", "c2"]], {})
    assert reasons(trajectory) == ["sibling", None]


def test_f17_kept_by_configuration() -> None:
    calls = one("c1", (5, 9), 1.0, FIRST), one("c1b", (6, 9), 2.0, AGAIN), AFTER
    assert names(built(*calls, retried="keep")) == [["c1"], ["c1b", "c2"]]
    with pytest.raises(ValueError, match="retried is 'drop'; it must be one of keep, exclude"):
        PrefixMergingBuilder(retried="drop")  # type: ignore[arg-type]  # what a spec may hold
    with pytest.raises(ValueError, match="retried is 'drop'"):
        PerRequestBuilder(retried="drop")  # type: ignore[arg-type]  # what a spec may hold


def test_f17_a_reply_that_was_gone_on_from_was_heard() -> None:
    trajectory = built(one("c1", (6, 9), 1.0, FIRST), one("c1b", (5, 9), 2.0, AGAIN), AFTER)
    assert (names(trajectory), excluded(trajectory)) == ([["c1", "c2"], ["c1b"]], {})


def test_f17_of_two_equal_replies_one_is_trained() -> None:
    trajectory = built(one("c1", (6, 9), 1.0, FIRST), one("c1b", (6, 9), 2.0, AGAIN), AFTER)
    assert (names(trajectory), excluded(trajectory)) == ([["c1b", "c2"]], {"retried": 2})


def test_f17_of_three_tries_the_last_is_trained() -> None:
    counts = [{"client_retries": str(number)} for number in range(3)]
    tries = [one(f"c1{number}", (5 + number, 9), 1.0 + number, count) for number, count in enumerate(counts)]
    assert (names(built(*tries)), excluded(built(*tries))) == ([["c12"]], {"retried": 4})
    assert names(built(tries[0], tries[2])) == [["c12"]]


def test_f17_a_failed_try_explains_the_retry_and_best_of_n_is_kept() -> None:
    best = one("c1", (5, 9), 1.0, {"client_retries": "0"}, messages=ASK)
    failed = completion(
        "c2", None, None, at=1.5, messages=ASK, status=CallStatus.ERROR, metadata={"client_retries": "0"}
    )
    again = one("c3", (6, 9), 2.0, {"client_retries": "1"}, messages=ASK)
    assert (names(built(best, failed, again)), excluded(built(best, failed, again))) == ([["c1"], ["c3"]], {})


def test_f17_a_retry_of_another_prompt_is_no_evidence() -> None:
    other = one("c2", (6, 9), 2.0, AGAIN, prompt=(1, 3))
    assert excluded(built(one("c1", (5, 9), 1.0, FIRST), other)) == {}


def test_f17_all_choices_of_an_unheard_call_are_excluded() -> None:
    two = [choice([5, 9]), choice([8, 9, 9], index=1)]
    first = completion("c1", PROMPT, two, at=1.0, metadata=FIRST)
    assert excluded(built(first, one("c1b", (6, 9), 2.0, AGAIN), AFTER)) == {"retried": 5}


def test_f17_a_compaction_that_is_tried_twice_is_one_compaction() -> None:
    compaction = [one("c8", (5, 9), 8.0, FIRST, prompt=(4, 4)), one("c9", (6, 9), 9.0, AGAIN, prompt=(4, 4))]
    trajectory = built(one("c1", (5, 9), 1.0, {}), *compaction)
    assert (names(trajectory), reasons(trajectory)) == ([["c1"], ["c9"]], [None, "compaction"])


def test_f17_per_request_has_no_trace_of_an_unheard_reply() -> None:
    calls = one("c1", (5, 9), 1.0, FIRST), one("c1b", (6, 9), 2.0, AGAIN), AFTER
    trajectory = PerRequestBuilder().build(session_of(*calls))
    assert (names(trajectory), excluded(trajectory)) == ([["c1b"], ["c2"]], {"retried": 2})
    assert len(PerRequestBuilder(retried="keep").build(session_of(*calls)).traces) == 3


def tokens(units: Iterable[TokenRange]) -> Counter[tuple[str, int, int]]:
    return Counter((unit.completion_id, unit.choice, token) for unit in units for token in range(unit.start, unit.stop))


METADATA = st.fixed_dictionaries(
    {},
    optional={
        "idempotency_key": st.sampled_from(["k1", "k2", ""]),
        "client_retries": st.sampled_from(["0", "1", "2", 1, None, "x"]),
    },
)


@examples(300, share=2)
@given(worlds(most=8), st.lists(METADATA, min_size=1, max_size=6), st.sampled_from(["keep", "exclude"]))
def test_f17_whatever_evidence_there_is_each_token_is_trained_once_or_excluded(
    world: Any, evidence: list[dict[str, Any]], siblings: Any
) -> None:
    records = [record.replace(metadata=evidence[number % len(evidence)]) for number, record in enumerate(world.records)]
    session = session_of(*records, session_id=records[0].session_id) if records else None
    for builder in (PrefixMergingBuilder(siblings=siblings), PerRequestBuilder()):
        if session is not None:
            trajectory = account_tokens(session, builder.build(session))
            accounted = tokens(unit for trace in trajectory.traces for unit in trace.units())
            accounted += tokens(unit for item in trajectory.excluded for unit in item.units)
            assert accounted == tokens(unit for record in records for unit in captured_units(record))
