"""Whatever fails in one record's outputs, that record alone is set aside, and the state is as before it (rule T6)."""

from __future__ import annotations

import pytest

from rollmill.codec import DEAD_LETTER, JSON, Headers, decode, header, manifest_header
from rollmill.errors import FatalError, PoisonRecordError
from rollmill.models import DeadLetterInfo, Manifest, PolicyVersion, TokenRange
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream import InputRecord, OutputRecord, Outputs, Processor, StateUpdate, StateView, TaskLocal
from rollmill.runtime.stream.batch_processor import BatchProcessor, TransactionBatch
from rollmill.runtime.stream.task_identity import task_identity
from rollmill.settings import ServiceSettings
from rollmill.topics import DEAD_LETTERS, Partitioning, Topic, changelog

INPUT = Topic("in", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "words")
OUTPUT = Topic("out", "word", None, "", "bytes", Partitioning.SHARED, 10_000, ("test",), ("test",), "words")
SETTINGS = ServiceSettings(partitions=1)
NULL_HEADER = ("traceparent", None)


class Words(Processor[int, TaskLocal]):
    """Counts words; some words break what the engine does with their outputs."""

    name = "words"
    inputs = (INPUT,)
    state_topic = changelog("words", Partitioning.SHARED)

    def task_local(self) -> TaskLocal:
        return TaskLocal()

    def process(self, _state: StateView[int], record: InputRecord, _local: TaskLocal) -> Outputs:
        word = (record.value or b"").decode()
        if word == "exit":
            raise SystemExit(0)
        if word == "fatal":
            raise FatalError("the disk is gone")
        if word == "bad":
            raise PoisonRecordError("malformed", "")
        headers: Headers = record.headers
        key = "\ud800" if word == "key" else word
        counts = {"words": "one" if word == "count" else 1}
        out = OutputRecord(OUTPUT, key, 5 if word == "value" else word.encode(), headers)  # type: ignore[arg-type]
        updates = (StateUpdate("total", b"+"), StateUpdate(word, b"broken" if word == "apply" else b"+"))
        return Outputs((out,), updates, counts=counts)  # type: ignore[arg-type]

    def apply(self, _key: str, value: int | None, payload: bytes, _local: TaskLocal) -> int:
        if payload == b"broken":
            raise KeyError("no such update")
        return (value or 0) + 1


class Bench:
    """Processes one record after the other."""

    def __init__(self) -> None:
        stage = Words()
        self.processor: BatchProcessor[int] = BatchProcessor(stage, task_identity(stage, 0, SETTINGS), SETTINGS)
        self.batch = TransactionBatch()

    def feed(self, value: bytes, headers: Headers = ()) -> None:
        offset = self.batch.inputs.total()
        record = InputRecord(INPUT, 0, offset, b"k%d" % offset, value, headers)
        self.processor.process(self.batch, record, "in/0", 0)

    def letters(self) -> list[tuple[DeadLetterInfo, ProducerRecord]]:
        found = [record for record in self.batch.records if record.topic == DEAD_LETTERS.full_name(SETTINGS.prefix)]
        as_json = (("content-type", JSON.encode()),)
        return [(decode(DeadLetterInfo, header(each.headers, DEAD_LETTER), as_json), each) for each in found]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("word", ["exit", "key", "value", "count", "apply"])
def test_t6_an_error_in_one_records_outputs_is_that_records(bench: Bench, word: str) -> None:
    bench.feed(b"a")
    bench.feed(word.encode())
    bench.feed(b"a")
    ((info, _),) = bench.letters()
    assert (info.reason, info.offset) == ("stage_error", 1)
    assert dict(bench.processor.state.items()) == {"a": 2, "total": 2}
    assert bench.batch.positions == {"in/0": 3}


def test_a_fatal_error_stays_fatal(bench: Bench) -> None:
    with pytest.raises(FatalError, match="disk"):
        bench.feed(b"fatal")


def test_nt01_a_header_without_a_value_is_kept_on_outputs_and_dead_letters(bench: Bench) -> None:
    bench.feed(b"a", (NULL_HEADER,))
    bench.feed(b"bad", (NULL_HEADER, ("x", b"")))
    ((_, letter),) = bench.letters()
    assert letter.headers[:2] == (NULL_HEADER, ("x", b""))
    assert bench.batch.records[0].headers == (NULL_HEADER,)
    assert bench.batch.size == sum(record.size for record in bench.batch.records)


@pytest.mark.parametrize(
    ("value", "headers"),
    [(b"bad" + bytes(10 * 2**20), ()), (b"bad", (("x", bytes(10 * 2**20)),))],
    ids=["value", "headers"],
)
def test_t6_a_record_too_large_for_a_dead_letter_leaves_reason_and_source(
    bench: Bench, value: bytes, headers: Headers
) -> None:
    units = (TokenRange("c1", 0, 0, 7, PolicyVersion()),)
    bench.feed(value, (*headers, manifest_header(Manifest(session_id="s", units=units))))
    ((info, letter),) = bench.letters()
    assert (letter.value, info.topic, info.offset) == (b"", "in", 0)
    assert "read it at its source" in info.error
    assert [record.topic for record in bench.batch.records][1:] == ["rollmill.outcomes"]


def test_t6_a_dead_letter_that_the_broker_refuses_is_repeated_bare(bench: Bench) -> None:
    bench.feed(b"bad", (("x", b"y"),))
    bench.processor.settle(None, committed=False)
    bench.batch = TransactionBatch()
    bench.processor.quarantine("in/0", 0, "policy violation")
    bench.feed(b"bad", (("x", b"y"),))
    ((info, letter),) = bench.letters()
    assert (info.reason, letter.value, len(letter.headers)) == ("outputs_refused", b"", 1)


def test_f2_a_record_over_its_own_topics_limit_is_its_producers_fault(bench: Bench) -> None:
    bench.feed(b"w" * 10_001)
    bench.feed(b"bad")
    assert [info.reason for info, _ in bench.letters()] == ["too_large", "malformed"]
    assert bench.processor.budget.level == 0
