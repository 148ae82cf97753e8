"""The builder's stage, run in memory with the engine's own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollmill.codec import JSON, decode, encode, header, read_manifest
from rollmill.models import (
    CallKind,
    CompletionRecord,
    CompletionSession,
    Disposition,
    ExcludedUnits,
    SessionClosed,
    SessionExpired,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    StrategySpec,
    TokenDisposition,
    TokenRange,
    Trace,
    TraceTurn,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.runtime.stream.processor import InputRecord, Outputs, StateUpdate
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry, trajectory_of
from rollmill.strategies.allow_list import SETTING
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import completion
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES, STATE_BUILDER
from rollmill_builder.app import build
from rollmill_builder.merging.per_request import PerRequestBuilder
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.settings import BuilderSettings
from rollmill_builder.stage import BuilderStage, BuilderState
from rollmill_builder.storage.call_parts import call_digest

PARTITIONS = 4


class Raising(BaseTrajectoryBuilder):
    def build(self, session: CompletionSession) -> Trajectory:
        raise RuntimeError(f"no idea at {object()!r}, {len(session.completions)} calls")


class Forgetful(BaseTrajectoryBuilder):
    """Trains the first call only and leaves the others out."""

    def build(self, session: CompletionSession) -> Trajectory:
        return trajectory_of(session, [trace_of(session.completions[0])])


class Greedy(BaseTrajectoryBuilder):
    """Trains the first call twice."""

    def build(self, session: CompletionSession) -> Trajectory:
        return trajectory_of(session, [trace_of(session.completions[0])] * 2)


class Contradicting(BaseTrajectoryBuilder):
    """Trains the first call and excludes it, too."""

    def build(self, session: CompletionSession) -> Trajectory:
        first = session.completions[0]
        units = (TokenRange(first.completion_id, 0, 1, 2, first.policy.before),)
        return trajectory_of(session, [trace_of(first)], excluded=[ExcludedUnits(reason="mine", units=units)])


def trace_of(record: CompletionRecord) -> Trace:
    (choice,) = record.choices
    count = len(choice.token_ids if choice.token_ids is not None else ())
    return Trace.model_validate(
        {
            "prompt_ids": record.prompt_ids,
            "response_ids": choice.token_ids,
            "loss_mask": [1] * count,
            "response_logprobs": choice.logprobs,
            "turns": (TraceTurn(completion_id=record.completion_id, start=0, stop=count),),
        }
    )


def registry() -> StrategyRegistry[BaseTrajectoryBuilder]:
    classes: Mapping[str, type[BaseTrajectoryBuilder]] = {
        "prefix_merging": PrefixMergingBuilder,
        "per_request": PerRequestBuilder,
        "raising": Raising,
        "forgetful": Forgetful,
        "greedy": Greedy,
        "contradicting": Contradicting,
    }
    return StrategyRegistry("builder", BaseTrajectoryBuilder, classes)  # type: ignore[type-abstract]  # only for subclass checks


SESSION = "s1"
HOME = 1  # partition of "s1" of four


def task(**more: Any) -> MemoryTask[BuilderState]:
    stage = BuilderStage(registry=registry(), partitions=PARTITIONS, late_window=100.0, **more)
    return MemoryTask(stage, partition=HOME)


def feed(run: MemoryTask[BuilderState], *events: Any) -> None:
    for event in events:
        run.feed(COMPLETIONS, event, key=event.session_id)


def opened(builder: str = "prefix_merging", **more: Any) -> SessionOpened:
    spec = SessionSpec(builder=StrategySpec(strategy=builder), deadline_seconds=60.0, idle_seconds=20.0)
    return SessionOpened(session_id=SESSION, spec=spec, at=1000.0, **more)


def call(
    name: str = "c1", prompt: tuple[int, ...] = (1, 2), reply: tuple[int, ...] = (5, 9), **more: Any
) -> CompletionRecord:
    return completion(name, prompt, reply, **{"at": 1001.0, **more})


def second(**more: Any) -> CompletionRecord:
    return call("c2", (1, 2, 5, 9, 3), (7, 9), at=1003.0, **more)


def closed(**more: Any) -> SessionClosed:
    return SessionClosed(session_id=SESSION, at=1010.0, **more)


def trajectories(run: MemoryTask[BuilderState]) -> list[Trajectory]:
    return [
        decode(Trajectory, output.value, output.headers) for output in run.of(BUILT) if isinstance(output.value, bytes)
    ]


def outcomes(run: MemoryTask[BuilderState]) -> list[tuple[Disposition, str | None, int]]:
    found = [output.value for output in run.of(OUTCOMES) if isinstance(output.value, TokenDisposition)]
    return [(item.disposition, item.reason, item.tokens) for item in found]


def assert_restorable(run: MemoryTask[BuilderState]) -> None:
    assert dict(run.restored().items()) == dict(run.state.items())


def test_a_session_becomes_one_trajectory() -> None:
    run = task()
    feed(run, opened(), call(), second())
    assert_restorable(run)
    assert not run.of(BUILT)
    feed(run, closed(output={"answer": 4}, reward=0.5))
    (trajectory,) = trajectories(run)
    assert [trace.response_ids.tolist() for trace in trajectory.traces] == [[5, 9, 3, 7, 9]]
    assert (trajectory.opened_at, trajectory.closed_at) == (1000.0, 1010.0)
    assert (trajectory.output, trajectory.reported_reward) == (b'{"answer":4}', 0.5)
    assert trajectory.spec == opened().spec
    assert outcomes(run) == [(Disposition.CAPTURED, None, 2), (Disposition.CAPTURED, None, 2)]
    assert_restorable(run)


def test_the_trajectory_carries_its_manifest_and_content_type() -> None:
    run = task()
    feed(run, opened(), call(), second(), closed())
    (output,) = run.of(BUILT)
    assert header(output.headers, "content-type") == b"application/msgpack"
    manifest = read_manifest(output.headers)
    assert manifest == trajectories(run)[0].manifest
    assert manifest is not None
    assert manifest.tokens == 4


def test_json_from_anyone_is_the_same_record() -> None:
    run = task()
    feed(run, call())
    run.feed(COMPLETIONS, encode(call(), JSON), key=SESSION)
    assert run.counts["duplicates"] == 1
    assert outcomes(run) == [(Disposition.CAPTURED, None, 2)]


def test_the_same_id_with_another_content_is_a_conflict() -> None:
    run = task()
    feed(run, call(), call(reply=(6, 9)))
    assert [error.reason for _, error in run.dead_letters] == ["conflict"]


def test_opening_again_is_a_duplicate_and_with_another_spec_a_conflict() -> None:
    run = task()
    feed(run, opened(), opened().replace(at=1000.5), opened("per_request"))
    assert run.counts["duplicates"] == 1
    assert [error.reason for _, error in run.dead_letters] == ["conflict"]


def test_a_duplicate_close_and_late_calls_give_no_second_trajectory() -> None:
    run = task()
    feed(run, opened(), call(), closed(), closed(), opened(), call(), second(), second())
    assert len(run.of(BUILT)) == 1
    assert outcomes(run)[1:] == [(Disposition.CAPTURED, None, 2), (Disposition.EXCLUDED, "late", 2)]
    assert (run.counts["late"], run.counts["duplicates"], run.counts["after_close"]) == (1, 2, 2)
    assert_restorable(run)


def test_a_call_before_opened_opens_with_defaults_and_takes_the_spec_that_comes_later() -> None:
    run = task()
    feed(run, call(), opened("per_request"), second(), closed())
    (trajectory,) = trajectories(run)
    assert trajectory.spec.builder.strategy == "per_request"
    assert len(trajectory.traces) == 2


def test_attempts_are_apart() -> None:
    run = task()
    feed(run, opened(), call(), closed(), call(attempt=2), closed(attempt=2))
    assert [(item.attempt, item.trained_tokens) for item in trajectories(run)] == [(1, 2), (2, 2)]


def test_f10_a_session_with_an_empty_choice_ends() -> None:
    run = task()
    empty = CompletionRecord.model_validate({"session_id": SESSION, "completion_id": "c0", "choices": [{}]})
    feed(run, opened(), empty, call(), closed())
    (trajectory,) = trajectories(run)
    assert (trajectory.trained_tokens, trajectory.error, run.dead_letters) == (2, None, [])


def test_f10_a_session_whose_calls_cannot_be_read_ends_with_every_token_excluded() -> None:
    run = task()
    feed(run, opened(), call())
    (session,) = [value for _, value in run.state.items() if isinstance(value, OpenSession)]
    record = call("c2", reply=(5, 9, 7))
    digest, parts = call_digest(record)
    unreadable = session.call_update(record, parts, digest).replace(rest=b"\x81\xa7choices\x01")
    run.state.stage(Outputs(updates=(StateUpdate("s1:1", encode(unreadable)),)), "b")
    feed(run, closed(), closed())
    (trajectory,) = trajectories(run)
    assert (trajectory.status, trajectory.traces, run.dead_letters) == (TrajectoryStatus.ERROR, (), [])
    assert [(item.reason, item.tokens) for item in trajectory.excluded] == [("unreadable", 5)]
    assert run.counts["excluded_unreadable"] == 5


@pytest.mark.parametrize(("key", "partition"), [("s2", 1), ("s1", 2), ("", 1)])
def test_m3_a_misplaced_record_is_rerouted_once_with_its_bytes(key: str, partition: int) -> None:
    run, value = task(), encode(call())
    run.feed(COMPLETIONS, value, key=key, partition=partition, headers=(("who", None),))
    (sent,) = run.of(COMPLETIONS)
    assert (sent.key, sent.partition, sent.value) == ("s1", 1, value)
    assert sent.headers[:2] == (("who", None), ("rerouted", b"%d:0" % partition))
    assert run.counts == {"completions_rerouted": 1}
    run.feed(COMPLETIONS, value, key=sent.key, headers=sent.headers)
    assert run.counts["completions"] == 1
    run.feed(COMPLETIONS, value, key=key, partition=partition, headers=sent.headers)
    ((_, error),) = run.dead_letters
    assert error.reason == "wrong_partition"
    assert "murmur2" in error.detail


def test_an_unknown_strategy_is_refused_and_the_session_goes_on_with_defaults() -> None:
    run = task()
    feed(run, opened("no_such_thing"), call(), closed())
    ((_, error),) = run.dead_letters
    assert error.reason == "unknown_strategy"
    assert "prefix_merging" in error.detail
    assert trajectories(run)[0].spec.builder.strategy == "prefix_merging"


def test_a_bad_config_is_refused() -> None:
    spec = SessionSpec(builder=StrategySpec(strategy="prefix_merging", config={"no_such_option": 1}))
    run = task()
    feed(run, SessionOpened(session_id=SESSION, spec=spec))
    assert run.dead_letters[0][1].reason == "unknown_strategy"


def test_output_that_is_no_json_is_refused_and_the_session_stays_open() -> None:
    run = task()
    feed(run, opened(), call(), closed(output=b"{not json"))
    assert run.dead_letters[0][1].reason == "invalid"
    feed(run, closed())
    assert len(run.of(BUILT)) == 1


def test_the_service_knows_both_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "rollmill_builder")
    service = build(BuilderSettings(partitions=PARTITIONS))
    (stage,) = service.stages
    assert isinstance(stage, BuilderStage)
    assert (service.name, stage.name, stage.inputs, stage.state_topic) == (
        "builder",
        "builder",
        (COMPLETIONS,),
        STATE_BUILDER,
    )
    run = MemoryTask(stage, partition=HOME)
    feed(run, opened("per_request"), opened("rollmill_builder.merging.per_request:PerRequestBuilder", attempt=2))
    assert not run.dead_letters


def test_an_empty_session_is_an_error_trajectory() -> None:
    run = task()
    feed(run, opened(), closed())
    (trajectory,) = trajectories(run)
    assert (trajectory.status, trajectory.error, trajectory.traces) == (TrajectoryStatus.ERROR, "no completions", ())


@pytest.mark.parametrize("status", [SessionStatus.TIMEOUT, SessionStatus.ERROR])
def test_a_session_that_ended_badly_keeps_its_traces(status: SessionStatus) -> None:
    run = task()
    feed(run, opened(), call(), closed(status=status, error="agent died"))
    (trajectory,) = trajectories(run)
    assert (trajectory.status, trajectory.error, len(trajectory.traces)) == (status, "agent died", 1)


def test_what_is_not_trained_is_excluded_at_the_close() -> None:
    run = task()
    feed(run, opened(), call(), call("c0", kind=CallKind.AUX), second(logprobs=None), closed())
    assert outcomes(run)[3:] == [(Disposition.EXCLUDED, "aux", 2), (Disposition.EXCLUDED, "no_logprobs", 2)]


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("raising", "RuntimeError: no idea at <object object at 0x>, 2 calls"),
        ("greedy", "completion c1 choice 0: token 0 is accounted for twice, by trace 0 and by trace 1"),
        ("contradicting", "completion c1 choice 0: token 1 is accounted for twice, by trace 0 and by excluded(mine)"),
    ],
)
def test_a_failing_builder_never_loses_a_session(builder: str, message: str) -> None:
    run = task()
    feed(run, opened(builder), call(), second(), closed())
    (trajectory,) = trajectories(run)
    assert trajectory.status == TrajectoryStatus.ERROR
    assert trajectory.error is not None
    assert message in trajectory.error
    assert outcomes(run)[2:] == [(Disposition.EXCLUDED, "builder_error", 4)]


def test_what_a_custom_builder_forgets_is_excluded() -> None:
    run = task()
    feed(run, opened("forgetful"), call(), second(), call("c3", kind=CallKind.AUX), closed())
    (trajectory,) = trajectories(run)
    assert trajectory.manifest.tokens == 2
    assert outcomes(run)[3:] == [(Disposition.EXCLUDED, "aux", 2), (Disposition.EXCLUDED, "builder_dropped", 2)]


def test_an_over_large_trajectory_gives_up_its_traces_not_the_session() -> None:
    run = task()
    prompt, reply = tuple(range(700_000)), tuple(range(700_000))
    feed(run, opened("per_request"), call(reply=reply), call("c2", prompt, (7, 9)), closed())
    (trajectory,) = trajectories(run)
    assert trajectory.traces == ()
    assert trajectory.error is not None
    assert str(BUILT.max_bytes) in trajectory.error
    assert outcomes(run)[2:] == [(Disposition.EXCLUDED, "too_large", 700_002)]


def expiries(run: MemoryTask[BuilderState]) -> list[SessionExpired]:
    return [output.value for output in run.of(COMPLETIONS) if isinstance(output.value, SessionExpired)]


def test_an_idle_session_is_asked_to_expire_once_and_ends_when_that_is_read() -> None:
    run = task()
    feed(run, opened(), call())
    run.punctuate(1010.0)
    assert expiries(run) == []
    run.punctuate(1030.0)
    run.punctuate(1031.5)
    (expiry,) = expiries(run)
    assert (expiry.reason, expiry.seen) == ("idle", 1)
    assert [output.partition for output in run.of(COMPLETIONS)] == [HOME]
    assert not run.of(BUILT)
    feed(run, expiry, expiry)
    (trajectory,) = trajectories(run)
    assert (trajectory.status, trajectory.error) == (TrajectoryStatus.TIMEOUT, "session expired: idle")
    assert (trajectory.closed_at, len(trajectory.traces)) == (1030.0, 1)


def test_idle_is_ignored_when_more_was_seen_and_the_deadline_is_not() -> None:
    run = task()
    feed(run, opened(), call())
    idle = SessionExpired(session_id=SESSION, reason="idle", seen=0, at=1030.0)
    feed(run, idle)
    assert not run.of(BUILT)
    feed(run, idle.replace(reason="deadline"))
    assert len(run.of(BUILT)) == 1


def test_the_deadline_counts_from_opening() -> None:
    run = task()
    feed(run, opened(), call(at=1055.0))
    for now in (1056.0, 1059.0):
        run.punctuate(now)
    assert expiries(run) == []
    run.punctuate(1060.0)
    assert [expiry.reason for expiry in expiries(run)] == ["deadline"]


def test_replayed_sessions_count_from_when_they_were_seen() -> None:
    run = task()
    feed(run, opened(), call())
    run.punctuate(90_000.0)
    feed(run, second())
    run.punctuate(90_019.0)
    run.punctuate(90_038.0)
    assert expiries(run) == []
    run.punctuate(90_039.0)
    run.punctuate(90_060.0)
    assert [expiry.reason for expiry in expiries(run)] == ["idle"]


def test_a_lost_word_of_a_timer_is_said_again() -> None:
    run = task()
    feed(run, opened(), call())
    for now in (1001.0, 1030.0, 1040.0, 1062.0):
        run.punctuate(now)
    assert len(expiries(run)) == 2


def test_timers_wait_for_the_backlog() -> None:
    run = task()
    feed(run, opened(), call())
    run.punctuate(9999.0, caught_up=False)
    assert expiries(run) == []


def test_sessions_without_event_times_expire_by_when_they_were_noticed() -> None:
    run = task()
    feed(run, call(at=0.0))
    run.punctuate(5000.0)
    assert expiries(run) == []
    run.punctuate(5000.0 + SessionSpec().idle_seconds)
    assert [expiry.reason for expiry in expiries(run)] == ["idle"]


def test_an_expiry_of_an_unknown_session_is_ignored() -> None:
    run = task()
    feed(run, SessionExpired(session_id=SESSION, reason="deadline", seen=0, at=1.0))
    assert not run.emitted
    assert run.counts == {"expiries_ignored": 1}


def test_old_markers_go_by_event_time_and_all_the_rest_is_kept() -> None:
    run = task()
    run.punctuate(2000.0)
    for number, at in enumerate([1000.0, 1050.0, 1101.0, 1160.0]):
        feed(run, SessionClosed(session_id=SESSION, attempt=number + 1, at=at))
    assert sorted(key for key, _ in run.state.items()) == ["s1:3/closed", "s1:4/closed", "sweep"]
    assert_restorable(run)


def test_one_wrong_clock_does_not_empty_the_memory() -> None:
    run = task()
    run.punctuate(1050.0)
    feed(
        run, *(SessionClosed(session_id=SESSION, attempt=1 + number, at=at) for number, at in enumerate([1000.0, 9e9]))
    )
    assert "s1:1/closed" in run.state


def test_undo_gives_back_the_calls_of_the_last_commit() -> None:
    run = task()
    feed(run, opened(), call())
    before = run.state.get("s1:1")
    record = InputRecord(COMPLETIONS, HOME, 2, SESSION.encode(), encode(second()))
    outputs = run.stage.process(run.state, record, run.local)
    run.state.stage(outputs, "z")
    run.state.rollback()
    run.local.rolled_back(run.state)
    assert run.state.get("s1:1") is before
    feed(run, call("c3", (1, 2, 5, 9, 4), (8, 9), at=1002.0), closed())
    assert [trace.response_ids.tolist() for trace in trajectories(run)[0].traces] == [[5, 9, 4, 8, 9]]
    assert_restorable(run)
