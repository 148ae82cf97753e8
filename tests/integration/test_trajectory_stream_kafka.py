"""Trainers that read trajectories themselves: one consumer of record, any number that read along."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollmill.codec import CONTENT_TYPE, decode, encode, manifest_header
from rollmill.errors import EXIT_FATAL, ConfigurationError, FencedError, InvalidInputError
from rollmill.models import Disposition, Manifest, Purpose, TokenDisposition, Trajectory, outcome
from rollmill.ops.dlq import read_letters
from rollmill.ops.ledger import read_balance
from rollmill.ops.ledger.pass_at_k import read_evals, report
from rollmill.runtime.app import run
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.trajectories import sample_trace, sample_trajectory
from rollmill.testing.topic_log import produce, read_all
from rollmill.topics import OUTCOMES, STATE_BATCHER, TRAJECTORIES, partition_of
from rollmill.trainer import BatchStream, NoBatch, Rollout, TrajectoryStream
from rollmill_batcher.app import build
from rollmill_batcher.settings import BatcherSettings

pytestmark = pytest.mark.kafka

WAIT = 20.0


@pytest.fixture
def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=2,
        transaction_timeout_ms=10_000,
        hand_over="trajectories",
    )
    asyncio.run(apply_topics(settings))
    return settings


def put(settings: KafkaSettings, *trajectories: Trajectory) -> None:
    asyncio.run(_put(settings, trajectories))


async def _put(settings: KafkaSettings, trajectories: Sequence[Trajectory]) -> None:
    async with KafkaClients(settings).producer() as producer:
        for each in trajectories:
            key = each.session_id.encode()
            await producer.send_and_wait(
                TRAJECTORIES.full_name(settings.prefix),
                encode(each, TRAJECTORIES.format),
                key,
                partition=partition_of(key, settings.partitions),
                headers=[(CONTENT_TYPE, TRAJECTORIES.format.encode())],
            )


def outcomes(settings: KafkaSettings) -> dict[str, list[tuple[Disposition, str | None]]]:
    async def read() -> list[TokenDisposition]:
        async with Log.open(settings) as log:
            return [
                decode(TokenDisposition, record.value, tuple(record.headers)) async for record in log.read(OUTCOMES)
            ]

    found: dict[str, list[tuple[Disposition, str | None]]] = {}
    for item in asyncio.run(read()):
        found.setdefault(item.session_id, []).append((item.disposition, item.reason))
    return found


def take(stream: TrajectoryStream, count: int) -> dict[str, Rollout]:
    taken: dict[str, Rollout] = {}
    for rollout in stream.trajectories(until=lambda: len(taken) == count, timeout=WAIT):
        taken[rollout.trajectory.session_id] = rollout
    return taken


TRAINED = [(Disposition.TRAINED, None)]


def test_what_is_acknowledged_is_trained_once_and_the_rest_comes_again(settings: KafkaSettings) -> None:
    put(settings, *(sample_trajectory(f"s{n}") for n in range(6)))
    with TrajectoryStream(settings=settings) as stream:
        taken = take(stream, 6)
        stream.ack([taken["s5"], taken["s2"]])
        stream.exclude([taken["s3"]], "too_easy")
        with pytest.raises(InvalidInputError, match="session s2 is not open"):
            stream.ack([taken["s2"]])
    with TrajectoryStream(settings=settings) as stream:
        again = take(stream, 3)
        assert set(again) == {"s0", "s1", "s4"}
        stream.ack(list(again.values()))
        with pytest.raises(NoBatch):
            next(stream.trajectories(timeout=0.5))
    found = outcomes(settings)
    assert found.pop("s3") == [(Disposition.EXCLUDED, "too_easy")]
    assert found == {f"s{n}": TRAINED for n in (0, 1, 2, 4, 5)}


def test_what_cannot_train_is_excluded_and_never_handed_over(settings: KafkaSettings) -> None:
    evaluation = sample_trajectory("exam")
    ungraded = sample_trajectory("blank", reward=None)
    half = sample_trajectory("half", traces=[sample_trace("half"), sample_trace("half", index=1)])
    half = half.replace(traces=(half.traces[0], half.traces[1].replace(reward=None)))
    put(
        settings,
        evaluation.replace(spec=evaluation.spec.replace(purpose=Purpose.EVAL)),
        ungraded.replace(ungraded_reason="deadline"),
        half,
        half.replace(revision=1),
    )
    with TrajectoryStream(settings=settings) as stream:
        taken = take(stream, 1)
        assert set(taken) == {"half"}
        stream.ack(list(taken.values()))
        with pytest.raises(NoBatch):
            next(stream.trajectories(timeout=0.5))
    assert outcomes(settings) == {
        "exam": [(Disposition.EXCLUDED, "eval")],
        "blank": [(Disposition.EXCLUDED, "ungraded:deadline")],
        "half": [(Disposition.TRAINED, None), (Disposition.EXCLUDED, "trace_not_graded")],
    }


def test_any_number_that_cannot_train_may_lie_between_rollouts_in_hand(settings: KafkaSettings) -> None:
    """A commit has room for some hundred finished offsets above an open one."""
    here = [name for name in (f"s{n}" for n in range(2400)) if partition_of(name.encode(), 2) == 0]
    first, *exams, last = here
    put(settings, sample_trajectory(first), *(sample_trajectory(e, purpose=Purpose.EVAL) for e in exams))
    put(settings, sample_trajectory(last))
    with TrajectoryStream(settings=settings) as stream:
        taken = take(stream, 2)
        assert set(taken) == {first, last}
        stream.ack([taken[last]])
        assert set(outcomes(settings)) == {last}
        stream.ack([taken[first]])
        assert stream.state_dict()["places"]["0"]["done"] == []
    found = outcomes(settings)
    assert (found.pop(first), found.pop(last)) == (TRAINED, TRAINED)
    assert found == {name: [(Disposition.EXCLUDED, "eval")] for name in exams}


def test_reading_along_sees_everything_and_writes_nothing(settings: KafkaSettings) -> None:
    put(
        settings,
        sample_trajectory("a"),
        sample_trajectory("a").replace(revision=1),
        sample_trajectory("b", reward=None),
    )
    with TrajectoryStream(settings=settings) as record, TrajectoryStream(settings=settings, record=False) as shadow:
        seen: list[str] = []
        for rollout in shadow.trajectories(until=lambda: len(seen) == 3, timeout=WAIT):
            seen.append(f"{rollout.trajectory.session_id}{rollout.trajectory.revision}")
        assert sorted(seen) == ["a0", "a1", "b0"]
        with pytest.raises(InvalidInputError, match="only reads"):
            shadow.ack([rollout])
        assert outcomes(settings) == {}
        record.ack(list(take(record, 1).values()))
    assert outcomes(settings)["a"] == TRAINED


def test_a_checkpoint_beats_the_committed_position(settings: KafkaSettings) -> None:
    put(settings, *(sample_trajectory(f"s{n}") for n in range(3)))
    with TrajectoryStream(settings=settings) as stream:
        beginning = stream.state_dict()
        first = take(stream, 3)
        stream.ack(list(first.values()))
        stream.load_state_dict(beginning)
        assert set(take(stream, 3)) == {"s0", "s1", "s2"}
        with pytest.raises(InvalidInputError, match="not open"):
            stream.ack(list(first.values()))
        with pytest.raises(ConfigurationError, match="run 'other'"):
            stream.load_state_dict({**beginning, "run": "other"})


def test_another_word_after_going_back_counts_once(settings: KafkaSettings) -> None:
    """Trained, taken back, trained or excluded anew: the ledger follows the last lineage, over a restart, too."""
    members = [sample_trajectory(f"s{n}") for n in range(3)]
    captured = [
        outcome(
            Disposition.CAPTURED,
            stage="builder",
            session_id=each.session_id,
            attempt=1,
            units=each.manifest.units,
            at=1.0,
        )
        for each in members
    ]
    words = [(word.session_id, encode(word, OUTCOMES.format)) for word in captured]
    asyncio.run(produce(settings, OUTCOMES, words))
    put(settings, *members)
    with TrajectoryStream(settings=settings) as stream:
        beginning = stream.state_dict()
        stream.ack(list(take(stream, 3).values()))
        stream.load_state_dict(beginning)
        again = take(stream, 3)
        stream.exclude([again["s0"]], "too_easy")
    with TrajectoryStream(settings=settings) as stream:
        rest = take(stream, 2)
        stream.exclude([rest["s1"]], "too_hard")
        stream.ack([rest["s2"]])
    balance = asyncio.run(read_balance(settings))
    assert balance.balanced
    assert balance.total.pending == 0
    assert balance.total.trained == members[2].trained_tokens
    assert dict(balance.total.excluded) == {
        "too_easy": members[0].trained_tokens,
        "too_hard": members[1].trained_tokens,
    }


def test_evals_are_read_from_the_topic(settings: KafkaSettings) -> None:
    exams = [sample_trajectory(f"e{n}", float(n), purpose=Purpose.EVAL) for n in (0, 1)]
    put(settings, *exams, sample_trajectory("t"), exams[0].replace(revision=1, evaluation={"outcome_reward": 1.0}))
    (line,) = report(asyncio.run(read_evals(settings)))
    assert line.as_json([1, 2])["pass_at"] == {"1": {"value": 1.0, "tasks": 1}, "2": {"value": 1.0, "tasks": 1}}


@pytest.mark.parametrize("hand_over", ["batches", "none"])
def test_a_run_is_handed_over_as_one_thing(settings: KafkaSettings, hand_over: str) -> None:
    other = settings.model_copy(update={"hand_over": hand_over})
    with pytest.raises(ConfigurationError, match=rf"handed over as {hand_over}, TrajectoryStream reads trajectories"):
        TrajectoryStream(settings=other)
    with pytest.raises(ConfigurationError, match="handed over as trajectories, BatchStream reads batches"):
        BatchStream(settings=settings)
    put(settings, sample_trajectory("a"))
    with TrajectoryStream(settings=other, record=False) as along:
        assert next(along.trajectories(timeout=WAIT)).trajectory.session_id == "a"


def test_no_batcher_starts_beside_a_trainer_that_reads_trajectories(settings: KafkaSettings) -> None:
    def batcher(**changes: Any) -> int:
        values = {**settings.model_dump(), "health_port": 0, "deadline_seconds": 5, **changes}
        return run(build(BatcherSettings(**values)))

    with TrajectoryStream(settings=settings) as stream:
        stream.state_dict()
    assert batcher(hand_over="batches") == EXIT_FATAL
    assert asyncio.run(read_all(settings, OUTCOMES)) == []


def test_a_batcher_of_a_run_that_hands_trajectories_over_makes_none(settings: KafkaSettings) -> None:
    service = build(BatcherSettings(**settings.model_dump(), deadline_seconds=5))
    assert (service.stages, service.checks) == ((), ())
    assert [worker.__name__ for worker in service.workers] == ["idle"]


def test_there_is_one_consumer_of_record(settings: KafkaSettings) -> None:
    put(settings, sample_trajectory("a"))
    with TrajectoryStream(settings=settings) as first, TrajectoryStream(settings=settings) as second:
        held = take(first, 1)
        take(second, 1)
        with pytest.raises(FencedError):
            first.ack(list(held.values()))


def test_ranks_share_the_partitions(settings: KafkaSettings) -> None:
    names = [f"s{n}" for n in range(8)]
    put(settings, *map(sample_trajectory, names))
    own = [[name for name in names if partition_of(name.encode(), 2) == rank] for rank in (0, 1)]
    for rank in (0, 1):
        with TrajectoryStream(rank, 2, settings=settings) as stream:
            assert sorted(take(stream, len(own[rank]))) == own[rank]


def test_a_run_with_a_batcher_has_its_consumer_of_record(settings: KafkaSettings) -> None:
    async def batcher_has_run() -> None:
        async with KafkaClients(settings).producer() as producer:
            await producer.send_and_wait(STATE_BATCHER.full_name(settings.prefix), b"x", b"!owner", partition=0)

    asyncio.run(batcher_has_run())
    with TrajectoryStream(settings=settings) as stream, pytest.raises(ConfigurationError, match="a batcher takes"):
        next(stream.trajectories(timeout=WAIT))


@pytest.mark.parametrize("record", [True, False])
def test_an_unreadable_trajectory_is_a_dead_letter_and_the_stream_goes_on(
    settings: KafkaSettings, *, record: bool
) -> None:
    good = [sample_trajectory(f"s{n}") for n in range(2)]
    put(settings, good[0])
    manifest = manifest_header(Manifest(session_id="bad", units=good[0].traces[0].units()))
    asyncio.run(produce(settings, TRAJECTORIES, [("bad", b"\xc1")], headers=(manifest,)))
    put(settings, good[1])
    with TrajectoryStream(settings=settings, record=record) as stream:
        taken = take(stream, 2)
        if record:
            stream.ack(list(taken.values()))
    with TrajectoryStream(settings=settings, record=record) as stream:
        for _ in range(0 if record else 2):
            next(stream.trajectories(timeout=WAIT))
        with pytest.raises(NoBatch):
            next(stream.trajectories(timeout=1.0))
    letters = list(asyncio.run(read_letters(settings)).values())
    found = [(letter.info.reason, letter.info.stage, letter.key) for letter in letters]
    assert found == ([("malformed", "trainer", b"bad")] if record else [])
    assert outcomes(settings).get("bad") == ([(Disposition.DEAD_LETTERED, "malformed")] if record else None)
