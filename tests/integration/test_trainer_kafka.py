"""The trainer SDK against Apache Kafka: what is read, what is written, and what is seen again after a restart."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from torch.utils.data import DataLoader

from grpo_minimal import train
from relay.learning import PackedTokens, grpo_step, make_optimizer, packed_log_probs
from relay.model import use_one_thread, warm_start
from rollmill.errors import ConfigurationError, FatalError, FencedError, InvalidInputError
from rollmill.models import (
    Disposition,
    EndOfStream,
    PolicyAnnouncement,
    PolicyVersion,
    Rewound,
    StepAcknowledged,
    TokenDisposition,
    TrainerEvent,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.batches import SampleTrace, Steps, step_values
from rollmill.topics import ACKS, BATCHES, OUTCOMES, POLICIES, Topic
from rollmill.trainer import BatchStream, NoBatch, PolicyPublisher, Step
from rollmill.trainer.dataset import StepDataset
from rollmill.trainer.layouts.safetensors_reader import read_batch

pytestmark = pytest.mark.kafka

WAIT = 20.0
ZERO = PolicyVersion()


@pytest.fixture
def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2, batch_partitions=2
    )
    asyncio.run(apply_topics(settings))
    return settings


def traces(step: int, rank: int = 0, version: PolicyVersion = ZERO) -> Sequence[Sequence[SampleTrace]]:
    """Two micro-batches with one trace each."""
    return [
        [SampleTrace(f"s{step}-{rank}-{n}", reply=(step, n, rank), version=version, group_id=f"g{step}")]
        for n in (0, 1)
    ]


def one_rank(step: int, version: PolicyVersion = ZERO) -> Steps:
    return [traces(step, version=version)]


def cut(settings: KafkaSettings, *steps: int, ranks: int = 1, version: PolicyVersion = ZERO, **header: Any) -> None:
    """Write steps as the batcher does: one transaction for each."""
    for step in steps:
        values = step_values(step, [traces(step, rank, version) for rank in range(ranks)], **header)
        asyncio.run(write(settings, values))


async def write(settings: KafkaSettings, values: Sequence[Sequence[bytes]], *, commit: bool = True) -> None:
    async with KafkaClients(settings).producer(f"{settings.prefix}test-batcher") as producer:
        await producer.begin_transaction()
        for rank, records in enumerate(values):
            for value in records:
                await (await producer.send(BATCHES.full_name(settings.prefix), value, b"step", partition=rank))
        await (producer.commit_transaction() if commit else producer.abort_transaction())


def everything(settings: KafkaSettings, topic: Topic) -> list[Any]:
    """All committed records of a topic now."""
    return asyncio.run(asyncio.wait_for(_everything(settings, topic), WAIT))


async def _everything(settings: KafkaSettings, topic: Topic) -> list[Any]:
    found: list[Any] = []
    stop = asyncio.Event()
    reader = GlobalTable(
        KafkaClients(settings), settings, topic, lambda _, value: found.append(value), lambda *_: pytest.fail("poison")
    )
    reading = asyncio.create_task(reader.run(stop))
    await reader.caught_up()
    stop.set()
    await reading
    return found


def take(stream: BatchStream, count: int, version: PolicyVersion = ZERO, *, ack: bool = True) -> list[Step]:
    steps: list[Step] = []
    for step in stream.steps(lambda: version, until=lambda: len(steps) == count, timeout=WAIT):
        steps.append(step)
        if ack:
            step.ack()
    return steps


def numbers(steps: Sequence[Step]) -> list[int]:
    return [step.number for step in steps]


def tokens(step: Step) -> list[list[int]]:
    return [mb.input_ids.tolist() for mb in step]


def test_steps_come_in_order_and_are_not_seen_again_once_acknowledged(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2)
    with BatchStream(settings=settings) as stream:
        steps = take(stream, 2)
    assert numbers(steps) == [0, 1]
    assert tokens(steps[1]) == [[1, 2, 1, 0, 0], [1, 2, 1, 1, 0]]
    with BatchStream(settings=settings) as stream:
        assert numbers(take(stream, 1)) == [2]
        with pytest.raises(NoBatch):
            next(stream.steps(lambda: ZERO, timeout=0.5))


def test_an_acknowledgement_writes_outcomes_and_position_as_one(settings: KafkaSettings) -> None:
    cut(settings, 0)
    with BatchStream(settings=settings) as stream:
        (step,) = take(stream, 1)
        assert stream.state_dict()["next_step"] == 1
    written: list[TokenDisposition] = everything(settings, OUTCOMES)
    assert {(item.session_id, item.disposition, item.batch_id) for item in written} == {
        ("s0-0-0", Disposition.TRAINED, "batch-0"),
        ("s0-0-1", Disposition.TRAINED, "batch-0"),
    }
    assert sum(item.tokens for item in written) == step.denominators.tokens == 6
    (acknowledged,) = everything(settings, ACKS)
    assert isinstance(acknowledged, StepAcknowledged)
    assert (acknowledged.step, acknowledged.rank, acknowledged.batch_id) == (0, 0, "batch-0")


# B083
def test_an_unacknowledged_step_is_seen_again_bit_identical(settings: KafkaSettings) -> None:
    cut(settings, 0, 1)
    with BatchStream(settings=settings) as stream:
        first, second = take(stream, 2, ack=False)
        first.ack()
    with BatchStream(settings=settings) as stream:
        (again,) = take(stream, 1)
    assert again.header == second.header
    for before, after in zip(second.arrays, again.arrays, strict=True):
        assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in vars(before))
    assert len(everything(settings, OUTCOMES)) == 4


def test_an_aborted_step_is_never_seen(settings: KafkaSettings) -> None:
    asyncio.run(write(settings, step_values(0, one_rank(0), batch_id="aborted"), commit=False))
    cut(settings, 0)
    with BatchStream(settings=settings) as stream:
        (step,) = take(stream, 1)
    assert step.batch_id == "batch-0"


def test_steps_are_acknowledged_in_order_and_once(settings: KafkaSettings) -> None:
    cut(settings, 0, 1)
    with BatchStream(settings=settings) as stream:
        first, second = take(stream, 2, ack=False)
        with pytest.raises(InvalidInputError, match="step 1 cannot be acknowledged before step 0"):
            second.ack()
        first.ack()
        with pytest.raises(InvalidInputError, match="step 0 is not open"):
            first.ack()
        second.ack()
    assert [item.step for item in everything(settings, ACKS)] == [0, 1]


def test_stale_traces_are_cleared_and_written_down(settings: KafkaSettings) -> None:
    mixed = [[traces(0, version=PolicyVersion(0, 1))[0], traces(0, version=PolicyVersion(0, 3))[1]]]
    asyncio.run(write(settings, step_values(0, mixed, max_staleness=1)))
    with BatchStream(settings=settings) as stream:
        (step,) = take(stream, 1, PolicyVersion(0, 3))
        assert [bool(mb.loss_mask.any()) for mb in step] == [False, True]
        assert step.denominator == 3
        assert stream.counts == {"steps_handed_over": 1, "traces_stale": 1, "tokens_stale": 3, "steps_acknowledged": 1}
    reasons = {item.session_id: item.reason for item in everything(settings, OUTCOMES)}
    assert reasons == {"s0-0-0": "stale_at_hand_over", "s0-0-1": None}


def test_a_step_of_which_nothing_is_left_is_closed_and_skipped(settings: KafkaSettings) -> None:
    old, new = PolicyVersion(0, 0), PolicyVersion(0, 5)
    for step, version in enumerate((new, old, new)):
        cut(settings, step, version=version, max_staleness=4)
    with BatchStream(settings=settings) as stream:
        first, third = take(stream, 2, new, ack=False)
        assert numbers((first, third)) == [0, 2]
        assert everything(settings, ACKS) == []
        first.ack()
        assert [item.step for item in everything(settings, ACKS)] == [0, 1]
        third.ack()
        assert stream.counts["steps_skipped"] == 1
    excluded = [item for item in everything(settings, OUTCOMES) if item.disposition is Disposition.EXCLUDED]
    assert {(item.session_id, item.reason) for item in excluded} == {
        ("s1-0-0", "stale_at_hand_over"),
        ("s1-0-1", "stale_at_hand_over"),
    }


def test_a_checkpoint_goes_back_and_says_so(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2)
    with BatchStream(settings=settings) as stream:
        take(stream, 1)
        checkpoint = stream.state_dict()
        (second,) = take(stream, 1)
    with BatchStream(settings=settings) as stream:
        stream.load_state_dict(checkpoint)
        again = take(stream, 2)
    assert numbers(again) == [1, 2]
    assert tokens(again[0]) == tokens(second)
    events: list[TrainerEvent] = everything(settings, ACKS)
    assert [type(item) for item in events] == [
        StepAcknowledged,
        StepAcknowledged,
        Rewound,
        StepAcknowledged,
        StepAcknowledged,
    ]
    assert [(item.next_step, item.rank) for item in events if isinstance(item, Rewound)] == [(1, 0)]


def test_the_newest_checkpoint_is_no_rewind(settings: KafkaSettings) -> None:
    cut(settings, 0, 1)
    with BatchStream(settings=settings) as stream:
        take(stream, 1)
        checkpoint = stream.state_dict()
    with BatchStream(settings=settings) as stream:
        stream.load_state_dict(checkpoint)
        assert stream.state_dict() == checkpoint
        assert numbers(take(stream, 1)) == [1]
    assert not any(isinstance(item, Rewound) for item in everything(settings, ACKS))


def test_a_checkpoint_from_before_the_first_step_is_no_rewind(settings: KafkaSettings) -> None:
    with BatchStream(settings=settings) as stream:
        beginning = stream.state_dict()
        stream.load_state_dict(beginning)
    cut(settings, 0)
    with BatchStream(settings=settings) as stream:
        assert stream.state_dict() == beginning
        assert numbers(take(stream, 1)) == [0]
    assert [type(item) for item in everything(settings, ACKS)] == [StepAcknowledged]


def test_a_checkpoint_ahead_of_a_rewind_is_acknowledged_again(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2)
    with BatchStream(settings=settings) as stream:
        take(stream, 1)
        early = stream.state_dict()
        take(stream, 2)
        late = stream.state_dict()
        stream.load_state_dict(early)
        stream.load_state_dict(late)
    events = everything(settings, ACKS)
    assert [item.step for item in events if isinstance(item, StepAcknowledged)] == [0, 1, 2, 1, 2]
    assert [item.batch_id for item in events[-2:]] == ["batch-1", "batch-2"]


def test_a_rewind_voids_open_steps_and_holds_after_a_crash(settings: KafkaSettings) -> None:
    cut(settings, 0, 1)
    with BatchStream(settings=settings) as stream:
        beginning = stream.state_dict()
        take(stream, 1)
        (held,) = take(stream, 1, ack=False)
        stream.load_state_dict(beginning)
        with pytest.raises(InvalidInputError, match="step 1 is not open"):
            held.ack()
    with BatchStream(settings=settings) as stream:
        assert numbers(take(stream, 2)) == [0, 1]


def test_a_world_size_that_the_ranks_do_not_divide_is_refused(settings: KafkaSettings) -> None:
    cut(settings, 0)
    with BatchStream(0, 2, settings=settings) as stream:
        with pytest.raises(ConfigurationError, match="world size 1, this trainer has 2"):
            next(stream.steps(lambda: ZERO, timeout=WAIT))
        with pytest.raises(ConfigurationError, match="world size 1, this trainer has 2"):
            next(stream.steps(lambda: ZERO, timeout=WAIT))


def test_one_rank_reads_what_is_cut_for_two(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, ranks=2)
    with BatchStream(settings=settings) as alone:
        first, second = take(alone, 2)
        checkpoint = alone.state_dict()
    assert [mb.input_ids.tolist()[2:] for mb in second] == [[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]]
    assert first.denominators.tokens == 12
    assert checkpoint["world_size"] == 2
    assert set(checkpoint["offsets"]) == {"0", "1"}
    assert len(everything(settings, OUTCOMES)) == 8
    acknowledged = [(item.step, item.rank) for item in everything(settings, ACKS)]
    assert sorted(acknowledged) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    cut(settings, 2, ranks=2)
    with BatchStream(settings=settings) as alone:
        assert numbers(take(alone, 1, ack=False)) == [2]


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_back(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2, ranks=2)
    with BatchStream(0, 2, settings=settings) as one, BatchStream(1, 2, settings=settings) as two:
        take(one, 1)
        take(two, 1)
        states = [one.state_dict(), two.state_dict()]
        take(one, 1)
    with BatchStream(settings=settings) as alone:
        with pytest.raises(ConfigurationError, match="the states of all ranks"):
            alone.load_state_dict(states[0])
        alone.load_state_dict(*states)
        assert numbers(take(alone, 1)) == [1]
        whole = alone.state_dict()
    with BatchStream(0, 2, settings=settings) as one, BatchStream(1, 2, settings=settings) as two:
        one.load_state_dict(whole)
        two.load_state_dict(whole)
        (left,), (right,) = take(one, 1), take(two, 1)
    assert (left.number, right.number) == (2, 2)
    assert tokens(left) != tokens(right)


def test_two_ranks_see_one_step_and_write_their_own_outcomes(settings: KafkaSettings) -> None:
    cut(settings, 0, ranks=2)
    with BatchStream(0, 2, settings=settings) as one, BatchStream(1, 2, settings=settings) as two:
        (left,), (right,) = take(one, 1), take(two, 1)
    assert left.denominators == right.denominators
    assert left.header.table == right.header.table
    assert tokens(left) != tokens(right)
    assert sorted(item.session_id for item in everything(settings, OUTCOMES)) == [
        "s0-0-0",
        "s0-0-1",
        "s0-1-0",
        "s0-1-1",
    ]
    assert sorted(item.rank for item in everything(settings, ACKS)) == [0, 1]


@pytest.mark.parametrize("steps", [1, 70])
def test_f7_ranks_go_on_together_after_a_job_that_died_between_their_acknowledgements(
    settings: KafkaSettings, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``steps``: how far rank 0 is ahead; 70 of them are more than the first records that are read back."""
    cut(settings, *range(steps + 1), ranks=2)
    with BatchStream(0, 2, settings=settings) as one, BatchStream(1, 2, settings=settings) as two:
        first = take(one, steps)
        (other,) = take(two, 1, ack=False)
    with (
        caplog.at_level("WARNING", "rollmill.trainer"),
        BatchStream(0, 2, settings=settings) as one,
        BatchStream(1, 2, settings=settings) as two,
    ):
        (left,), (right,) = take(one, 1), take(two, 1)
        assert (left.number, right.number) == (0, 0)
        assert (tokens(left), tokens(right)) == (tokens(first[0]), tokens(other))
        assert [numbers(take(each, steps)) for each in (one, two)] == [list(range(1, steps + 1))] * 2
    messages = [record.message for record in caplog.records if record.name.startswith("rollmill.")]
    assert len(messages) == 1
    assert f"rank 0 had acknowledged steps 0 to {steps - 1}, and ranks [1] had not" in messages[0]
    (rewound,) = [item for item in everything(settings, ACKS) if isinstance(item, Rewound)]
    assert (rewound.rank, rewound.next_step) == (0, 0)


def test_f7_a_checkpoint_wins_over_the_ranks_that_are_behind(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2, ranks=2)
    with BatchStream(0, 2, settings=settings) as one:
        take(one, 2)
        checkpoint = one.state_dict()
    with BatchStream(0, 2, settings=settings) as one:
        one.load_state_dict(checkpoint)
        assert numbers(take(one, 1)) == [2]
    assert not [item for item in everything(settings, ACKS) if isinstance(item, Rewound)]


async def _delete_first(settings: KafkaSettings) -> None:
    admin = KafkaClients(settings).admin()
    await admin.start()
    try:
        partition = TopicPartition(BATCHES.full_name(settings.prefix), 0)
        await admin.delete_records({partition: RecordsToDelete(before_offset=2)})
    finally:
        await admin.close()


def test_f7_a_rank_that_cannot_go_back_is_refused(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, ranks=2)
    with BatchStream(0, 2, settings=settings) as one:
        take(one, 1)
    asyncio.run(_delete_first(settings))
    with (
        BatchStream(0, 2, settings=settings) as one,
        pytest.raises(ConfigurationError, match=r"does not hold step 0 any more: load a checkpoint"),
    ):
        take(one, 1)


@pytest.mark.parametrize("stale", ["mask", "drop_step"])
def test_two_ranks_never_see_different_steps_while_the_gate_drops_some(settings: KafkaSettings, stale: str) -> None:
    """Only the first rank's micro-batches hold the stale traces."""
    total = 12
    for step in range(total):
        version = PolicyVersion(0, max(0, step - 3 if step % 3 else step - 5))
        values = step_values(step, [traces(step, 0, version), traces(step, 1, PolicyVersion(0, step))], max_staleness=4)
        asyncio.run(write(settings, values))

    def train(rank: int) -> list[tuple[int, float, int]]:
        seen: list[tuple[int, float, int]] = []
        last = total - 1
        with BatchStream(rank, 2, settings=settings, stale=stale, timeout=WAIT) as stream:
            standing = iter(range(total))
            for step in stream.steps(
                lambda: PolicyVersion(0, next(standing)), until=lambda: bool(seen) and seen[-1][0] == last
            ):
                seen.append((step.number, step.denominator, step.verdict.cleared))
                step.ack()
        return seen

    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(train, (0, 1))
    assert left == right
    dropped = {step for step in range(total) if step % 3 == 0 and step >= 5}
    whole = [number for number, _, _ in left]
    if stale == "mask":
        assert whole == list(range(total))
        assert {number for number, _, cleared in left if cleared} == dropped
    else:
        assert whole == [step for step in range(total) if step not in dropped]
    events = [(item.step, item.rank) for item in everything(settings, ACKS)]
    assert sorted(events) == [(step, rank) for step in range(total) for rank in (0, 1)]


def test_a_data_loader_hands_steps_through_and_keeps_their_place(settings: KafkaSettings) -> None:
    cut(settings, 0, 1, 2)
    seen: list[int] = []
    with BatchStream(settings=settings, timeout=WAIT) as stream:
        dataset = StepDataset(stream, lambda: ZERO, until=lambda: len(seen) == 2)
        loader: DataLoader[Step] = DataLoader(dataset, batch_size=None)
        for step in loader:
            seen.append(step.number)
            step.ack()
        checkpoint = dataset.state_dict()
    assert seen == [0, 1]
    with BatchStream(settings=settings, timeout=WAIT) as stream:
        dataset = StepDataset(stream, lambda: ZERO)
        dataset.load_state_dict(checkpoint)
        assert next(iter(dataset)).number == 2


def test_a_second_trainer_of_a_rank_fences_the_first(settings: KafkaSettings) -> None:
    cut(settings, 0)
    with BatchStream(settings=settings) as first, BatchStream(settings=settings) as second:
        (held,) = take(first, 1, ack=False)
        (step,) = take(second, 1, ack=False)
        with pytest.raises(FencedError, match="another process"):
            held.ack()
        with pytest.raises(FatalError):
            held.ack()
        step.ack()
    assert len(everything(settings, ACKS)) == 1


def test_no_batch_says_what_is_awaited(settings: KafkaSettings) -> None:
    cut(settings, 0)
    with BatchStream(settings=settings, timeout=1.0) as stream:
        (held,) = take(stream, 1, ack=False)
        with pytest.raises(
            NoBatch, match=r"rank 0 of run 'run' expects step 1 .*last seen: step 0 .*not acknowledged: 0"
        ):
            next(stream.steps(lambda: ZERO))
        cut(settings, 1)
        assert numbers(take(stream, 1, ack=False)) == [1]
        held.ack()


def test_stop_ends_a_waiting_loop(settings: KafkaSettings) -> None:
    with BatchStream(settings=settings) as stream:
        stream.state_dict()
        timer = threading.Timer(0.2, stream.stop)
        timer.start()
        assert list(stream.steps(lambda: ZERO)) == []
        timer.join()


def test_a_version_function_that_fails_loses_no_step(settings: KafkaSettings) -> None:
    cut(settings, 0)

    def fail() -> PolicyVersion:
        raise ZeroDivisionError

    with BatchStream(settings=settings) as stream:
        with pytest.raises(ZeroDivisionError):
            next(stream.steps(fail, timeout=WAIT))
        with pytest.raises(InvalidInputError, match=r"is \(epoch, version\), not 3: pass `PolicyPublisher.version`"):
            next(stream.steps(lambda: cast("tuple[int, int]", 3), timeout=WAIT))
        assert numbers(take(stream, 1)) == [0]


def test_a_record_that_is_no_batch_stops_the_trainer_with_its_position(settings: KafkaSettings) -> None:
    cut(settings, 0)
    asyncio.run(write(settings, [[b"rubbish"]]))
    with BatchStream(settings=settings) as stream:
        assert numbers(take(stream, 1)) == [0]
        for _ in range(2):
            with pytest.raises(FatalError, match=r"batches/0 offset 2 is no readable batch"):
                next(stream.steps(lambda: ZERO, timeout=WAIT))


def test_the_end_of_the_stream_is_an_event_of_the_trainer(settings: KafkaSettings) -> None:
    with BatchStream(settings=settings) as stream:
        stream.end_of_stream()
    (event,) = everything(settings, ACKS)
    assert isinstance(event, EndOfStream)
    assert event.run == settings.run


def test_versions_only_go_up_within_an_epoch(settings: KafkaSettings) -> None:
    with PolicyPublisher(settings=settings) as publisher:
        assert publisher.version == ZERO
        assert publisher.announce(0) == ZERO
        assert publisher.announce(ZERO) == ZERO
        assert publisher.update(3) == PolicyVersion(0, 3)
        for refused in (3, 2, PolicyVersion(1, 4)):
            with pytest.raises(InvalidInputError):
                publisher.update(refused)
    announced: list[PolicyAnnouncement] = everything(settings, POLICIES)
    assert [item.version for item in announced] == [(0, 0), (0, 3)]


def test_a_publisher_knows_what_was_announced_before_it(settings: KafkaSettings) -> None:
    with PolicyPublisher(settings=settings) as publisher:
        publisher.update(3)
    with PolicyPublisher("another", settings=settings) as publisher:
        assert publisher.version == ZERO
    with PolicyPublisher(settings=settings) as publisher:
        assert publisher.version == PolicyVersion(0, 3)
        assert publisher.resume(2) == PolicyVersion(1, 2)
        with pytest.raises(InvalidInputError, match=r"epoch 1 .* was used already"):
            publisher.resume(2, epoch=1)
        with pytest.raises(InvalidInputError, match=r"skips epochs: the next one is 2"):  # f11
            publisher.resume(2, epoch=1_700_000_000)
        publisher.update(3)
    announced: list[PolicyAnnouncement] = everything(settings, POLICIES)
    assert [(item.version, item.resumed_from) for item in announced] == [((0, 3), None), ((1, 2), 2), ((1, 3), None)]


def test_a_second_publisher_of_a_policy_fences_the_first(settings: KafkaSettings) -> None:
    with PolicyPublisher(settings=settings) as first, PolicyPublisher(settings=settings) as second:
        assert first.version == second.version == ZERO
        second.update(1)
        with pytest.raises(FencedError):
            first.update(1)


def test_the_gate_learns_of_a_new_epoch_from_the_log(settings: KafkaSettings) -> None:
    cut(settings, 0, version=PolicyVersion(0, 5), max_staleness=2)
    resumed = PolicyVersion(1, 4)
    with BatchStream(settings=settings) as stream:
        with pytest.raises(InvalidInputError, match=r"start of epoch 1 is not announced"):
            next(stream.steps(lambda: resumed, timeout=WAIT))
        with PolicyPublisher(settings=settings) as publisher:
            publisher.announce(PolicyVersion(0, 5))
            publisher.resume(4)
        (step,) = take(stream, 1, resumed)
        assert step.denominators.tokens == 6
        assert stream.state_dict()["epoch"] == 1


def test_a_closed_stream_ends_its_loop_and_keeps_its_state(settings: KafkaSettings) -> None:
    cut(settings, 0, 1)
    with BatchStream(settings=settings) as stream:
        (held,) = take(stream, 1, ack=False)
        looping = stream.steps(lambda: ZERO)
        next(looping)
    assert list(looping) == []
    assert stream.state_dict()["next_step"] == 0
    with pytest.raises(FatalError, match="is closed"):
        held.ack()
    stream.close()


def test_the_minimal_loop_does_the_step_of_the_recipe_and_publishes_it(settings: KafkaSettings) -> None:
    use_one_thread()
    rollouts = [
        SampleTrace(f"r{n}", prompt=(1, 2, 3), reply=(4 + n, 5), log_probs=(-2.0 - n, -3.0), advantage=1.0 - n)
        for n in range(3)
    ]
    values = step_values(0, [[rollouts[:2], rollouts[2:]]])
    asyncio.run(write(settings, values))
    model, expected = warm_start(seed=1), warm_start(seed=1)
    grpo_step(expected, make_optimizer(expected), [recipe_input(value) for value in values[0]])
    handed_over: list[int] = []
    losses: list[float] = []
    with BatchStream(settings=settings) as stream, PolicyPublisher(settings=settings) as publisher:
        train(
            stream,
            publisher,
            model,
            make_optimizer(model),
            log_probs=lambda ids, bounds: packed_log_probs(model, ids, bounds),
            hand_over=handed_over.append,
            after_step=lambda _, loss: losses.append(loss),
            until=lambda: bool(losses),
            timeout=WAIT,
        )
        assert publisher.version == PolicyVersion(0, 1)
    for name, weights in model.state_dict().items():
        assert torch.allclose(weights, expected.state_dict()[name], atol=1e-6), name
    assert handed_over == [1]
    assert [item.step for item in everything(settings, ACKS)] == [0]


def recipe_input(value: bytes) -> PackedTokens:
    batch = read_batch(value)
    return PackedTokens(
        input_ids=torch.tensor(batch.input_ids.tolist()),
        cu_seqlens=torch.tensor(batch.cu_seqlens.tolist()),
        loss_mask=torch.tensor(batch.loss_mask.tolist()),
        behavior_log_probs=torch.tensor(batch.behavior_log_probs.tolist()),
        advantages=torch.tensor(np.repeat(batch.advantages, np.diff(batch.cu_seqlens)).tolist()),
    )
