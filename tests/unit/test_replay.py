"""The pure parts of a replay: which sessions, what order, what is compared."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from rollmill.cli.commands.replay import offsets, options
from rollmill.errors import InvalidInputError
from rollmill.models import (
    Disposition,
    EvaluatorSpec,
    PolicyVersion,
    SessionOpened,
    SessionStatus,
    StrategySpec,
    TokenRange,
    Trajectory,
    outcome,
)
from rollmill.ops.ledger import Reconciliation
from rollmill.ops.replay.comparison import Comparison
from rollmill.ops.replay.merge import PendingEvaluations
from rollmill.ops.replay.plan import Plan, settings_into
from rollmill.ops.replay.selection import Selection
from rollmill.ops.replay.summary import Summary
from rollmill.ops.replay.timeline import InputKind, TimedInput, in_time_order, merged, rewarded_at, slices
from rollmill.runtime.stream import InputRecord
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.sessions import completion
from rollmill.topics import COMPLETIONS, EVALUATIONS

LIVE = KafkaSettings.model_construct(prefix="live.")
PLAN = Plan(LIVE, settings_into(LIVE, "replay."))
OTHER = StrategySpec(strategy="per_request")


def event(kind: str, session: str = "s", *, offset: int = 0, **fields: Any) -> InputRecord:
    value = orjson.dumps({"type": kind, "session_id": session, **fields})
    return InputRecord(COMPLETIONS, 0, offset, session.encode(), value)


def call(session: str = "s", *, at: float = 0.0, offset: int = 0) -> InputRecord:
    record = completion("c", [1], [2], session_id=session, at=at)
    return InputRecord(COMPLETIONS, 0, offset, session.encode(), record.model_dump_json().encode())


def read(selection: Selection, *records: InputRecord) -> list[Any]:
    return [item.read() for record in records for item in selection.take(record)]


def test_without_other_rules_the_bytes_stay() -> None:
    records = [event("session_opened"), call(), event("session_closed")]
    selection = Selection(PLAN)
    assert [item for record in records for item in selection.take(record)] == records
    assert (selection.taken, selection.left_out) == ({("s", 1)}, set())


def test_a_session_is_opened_with_the_plans_rules() -> None:
    graders = (EvaluatorSpec(strategy="session_completed"),)
    plan = replace(PLAN, builder=OTHER, evaluators=graders)
    opened = event("session_opened", spec={"group_id": "g", "evaluators": [{"strategy": "reported"}]})
    (found,) = read(Selection(plan), opened)
    assert (found.spec.builder, found.spec.evaluators, found.spec.group_id) == (OTHER, graders, "g")


def test_a_session_that_nobody_opened_gets_the_plans_rules_at_its_end() -> None:
    first, opened, closed = read(Selection(replace(PLAN, builder=OTHER)), call(), event("session_closed"))
    assert isinstance(opened, SessionOpened)
    assert (opened.spec.builder, opened.at) == (OTHER, 0.0)
    assert (first.type, closed.type) == ("completion", "session_closed")


def test_a_session_is_taken_whole_or_not_at_all() -> None:
    selection = Selection(replace(PLAN, since=100.0))
    early = [event("session_opened", "a", at=99.0), call("a", at=150.0)]
    late = [call("b", at=100.0), event("session_closed", "b", at=120.0), event("session_opened", "c", at=130.0)]
    assert [item.session_id for item in read(selection, *early, *late)] == ["b", "b", "c"]
    assert selection.left_out == {("a", 1)}


def test_offsets_count_by_partition() -> None:
    records = [event("session_opened", "a", offset=6), event("session_opened", "b", offset=7), call("a", offset=8)]
    for start in (7, {0: 7}):
        selection = Selection(replace(PLAN, from_offset=start))
        assert [item.session_id for item in read(selection, *records)] == ["b"]
    assert len(read(Selection(replace(PLAN, from_offset={1: 7})), *records)) == 3


def test_where_the_beginning_was_deleted_only_opened_sessions_are_whole() -> None:
    selection = Selection(PLAN, truncated=frozenset({0}))
    assert [item.session_id for item in read(selection, call("a"), event("session_opened", "b"))] == ["b"]


def test_what_cannot_be_read_dies_again() -> None:
    broken = InputRecord(COMPLETIONS, 0, 5, b"s", b"{")
    assert list(Selection(PLAN).take(broken)) == [broken]
    assert list(Selection(replace(PLAN, from_offset=6)).take(broken)) == []
    assert list(Selection(replace(PLAN, since=1.0)).take(broken)) == []


async def collected(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def ordered(taken: Iterable[TimedInput]) -> list[TimedInput]:
    """Split over streams at random, then merged."""
    streams: list[list[TimedInput]] = [[], [], []]
    for item in taken:
        random.Random(item.offset).choice(streams).append(item)  # noqa: S311  # any split will do
    return await collected(merged([in_time_order(stream) for stream in streams]))


async def test_streams_are_merged_by_time_then_kind_then_place() -> None:
    inputs = [TimedInput(float(at), kind, 0, 10 * at + kind) for at in range(5) for kind in InputKind]
    shuffled = random.Random(1).sample(inputs, len(inputs))  # noqa: S311  # any order will do
    assert await ordered(shuffled) == inputs


async def test_slices_hold_so_much_time() -> None:
    stream = in_time_order(TimedInput(at, InputKind.TRAJECTORY) for at in (0.0, 0.2, 0.25, 0.4, 9.0))
    assert [[item.at for item in part] for part in await collected(slices(stream, 0.25))] == [
        [0.0, 0.2],
        [0.25, 0.4],
        [9.0],
    ]


def evaluation(offset: int) -> InputRecord:
    return InputRecord(EVALUATIONS, 0, offset, b"s", b"{}")


def test_evaluations_come_in_the_order_of_time_and_of_their_session() -> None:
    waiting = PendingEvaluations()
    for offset, (session, at) in enumerate([("a", 50.0), ("a", 0.0), ("b", 20.0), ("c", 1.0)]):
        waiting.add((session, 1), at, evaluation(offset))
    waiting.built(("a", 1), 10.0)
    assert list(waiting.until(30.0)) == []
    waiting.built(("b", 1), 30.0)
    assert [record.offset for record in waiting.until(40.0)] == [2]
    assert [record.offset for record in waiting.until(float("inf"))] == [0, 1]
    assert [record.offset for record in waiting.orphans()] == [3]


def trajectory(name: str = "s", revision: int = 0, **changes: Any) -> Trajectory:
    return Trajectory(session_id=name, status=SessionStatus.COMPLETED, revision=revision, **changes)


def test_a_trajectory_counts_from_its_last_grade() -> None:
    said = {"evaluations": [{"at": 30.0}, {"at": 0.0}, {}]}
    assert rewarded_at(trajectory(closed_at=10.0)) == 10.0
    assert rewarded_at(trajectory(closed_at=10.0, evaluation=said)) == 30.0


def summary(*found: Trajectory, trained: int) -> Summary:
    accounts, units = Reconciliation(), (TokenRange("c", 0, 0, 10, PolicyVersion()),)
    parts = (TokenRange("c", 0, 0, trained, PolicyVersion()), TokenRange("c", 0, trained, 10, PolicyVersion()))
    for disposition, own, reason in (
        (Disposition.CAPTURED, units, None),
        (Disposition.TRAINED, parts[:1], None),
        (Disposition.EXCLUDED, parts[1:], "stale"),
    ):
        accounts.book(outcome(disposition, stage="t", session_id="s", attempt=1, units=own, reason=reason))
    made = Summary(accounts.balance())
    for each in found:
        made.take(each)
    return made


def test_the_newest_revision_is_compared() -> None:
    graded = trajectory(revision=1, evaluation={"outcome_reward": 0.5})
    found = summary(graded, trajectory(revision=0), trajectory("t", ungraded_reason="deadline"), trained=10).as_json()
    assert found["rewards"]["mean"] == 0.5
    assert found["trajectories"] == 2
    assert found["tokens"]["drop_rate"] == 0.0


def test_the_comparison_has_a_line_per_number() -> None:
    comparison = Comparison(summary(trained=10), summary(trained=5), sessions=1, left_out=2)
    found = [line.split() for line in comparison.table().splitlines()]
    assert ["tokens", "drop", "rate", "0", "0.5"] in found
    assert ["tokens", "excluded", "stale", "-", "5"] in found
    assert "2 began before" in comparison.table().splitlines()[0]
    assert comparison.as_json()["left_out"] == 2


def test_options_and_offsets_as_they_are_typed() -> None:
    assert options(["max_staleness=none", "min_k=4", "advantage=rloo"]) == {
        "max_staleness": None,
        "min_k": 4,
        "advantage": "rloo",
    }
    assert (offsets("12"), offsets("0:5, 1:7")) == (12, {0: 5, 1: 7})
    for wrong in ("x", "0:", "1:2:3"):
        with pytest.raises(InvalidInputError):
            offsets(wrong)
    with pytest.raises(InvalidInputError):
        options(["min_k"])


@pytest.mark.parametrize("prefix", ["", "no dot", "x"])
def test_a_prefix_that_is_none(prefix: str) -> None:
    with pytest.raises(InvalidInputError):
        settings_into(LIVE, prefix)


def test_an_event_with_other_rules_is_not_what_its_blob_held() -> None:
    kept = replace(event("session_opened"), value=b"a reference", resolved=event("session_opened").value)
    (found,) = read(Selection(replace(PLAN, builder=OTHER)), kept)
    assert found.spec.builder == OTHER
