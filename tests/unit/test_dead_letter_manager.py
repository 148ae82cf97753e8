"""Dead letters as an operator sees them: numbers, filters, decisions, and what is driven again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from aiokafka import ConsumerRecord

from rollmill.cli.dead_letters import in_full, letter_filter, table
from rollmill.cli.tail import line
from rollmill.cli.timestamps import parse_time
from rollmill.codec import DEAD_LETTER, DEAD_LETTER_DECISION, JSON, Headers, decode, encode, manifest_header
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.ops.dlq import DeadLetter, LetterNumber, LetterState, select_letters
from rollmill.ops.dlq.dead_letter import DeadLetterIndex
from rollmill.ops.dlq.manager import redrive_records
from rollmill.runtime.stream import InputRecord
from rollmill.runtime.stream.dead_letters import dead_letter
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, POLICIES, Topic, partition_of

SETTINGS = KafkaSettings.model_construct(prefix="t.")
UNITS = (TokenRange("c1", 0, 0, 7, PolicyVersion(0, 3)),)
CARRIED = manifest_header(Manifest(session_id="s", units=UNITS))


def letter_record(
    offset: int,
    topic: Topic = BUILT,
    *,
    key: bytes = b"s",
    value: bytes = b"as received",
    headers: Headers = (("trace", b"x"), CARRIED),
    error: PoisonRecordError | None = None,
) -> ConsumerRecord[bytes, bytes]:
    """A record of ``dead-letters`` as the engine writes it."""
    received = InputRecord(topic, 3, 41, key, value, headers)
    emit = dead_letter(received, "reward-merger", error or PoisonRecordError("malformed", "no MessagePack")).records[0]
    assert isinstance(emit.value, bytes)
    return record(offset, emit.key.encode(), emit.value, emit.headers)


def record(
    offset: int, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes | None]]
) -> ConsumerRecord[bytes, bytes]:
    name, at = DEAD_LETTERS.full_name("t."), 1000_000 * (offset + 1)
    return ConsumerRecord(name, 3, offset, at, 0, key, value, None, len(key), len(value), tuple(headers))


def decision_record(offset: int, kind: str, of: int) -> ConsumerRecord[bytes, bytes]:
    word = DeadLetterDecision.model_validate(
        {"decision": kind, "partition": 3, "offset": of, "by": "ada", "why": "a test", "at": 1.0}
    )
    return record(offset, b"s", b"", [(DEAD_LETTER_DECISION, encode(word, JSON))])


def letters_of(*records: ConsumerRecord[bytes, bytes]) -> dict[LetterNumber, DeadLetter]:
    letters = DeadLetterIndex()
    for each in records:
        letters.take(each)
    return letters.found


def test_a_letter_is_the_record_as_it_came() -> None:
    (letter,) = letters_of(letter_record(0)).values()
    assert (letter.number, letter.key, letter.headers) == (LetterNumber(3, 0), b"s", (("trace", b"x"), CARRIED))
    assert (letter.info.reason, letter.source, letter.size, letter.at) == ("malformed", "built/3@41", 11, 1000.0)


@pytest.mark.parametrize("key", [b"", b"\xff\xfe", b"built-3", "ü".encode()])
def test_every_key_comes_back_as_it_was(key: bytes) -> None:
    (letter,) = letters_of(letter_record(0, key=key)).values()
    assert letter.key == key


def test_a_letter_that_died_twice_keeps_its_first_death_out_of_the_second() -> None:
    (first,) = letters_of(letter_record(0)).values()
    driven = redrive_records(first, b"as received", SETTINGS)[0]
    assert driven.headers[-1] == ("re-driven", b"3:0")
    (second,) = letters_of(letter_record(9, headers=driven.headers)).values()
    assert redrive_records(second, b"", SETTINGS)[0].headers == (("trace", b"x"), CARRIED, ("re-driven", b"3:9"))


def test_decisions_give_the_state() -> None:
    found = letters_of(
        letter_record(0),
        letter_record(1),
        letter_record(2),
        decision_record(3, "dropped", of=1),
        decision_record(4, "replayed", of=2),
    )
    assert [str(letter.state) for letter in found.values()] == ["open", "dropped", "replayed"]
    assert found[LetterNumber(3, 1)].decisions[0].by == "ada"


def test_what_says_nothing_of_itself_is_a_letter_that_can_be_driven_nowhere() -> None:
    found = letters_of(record(7, b"s", b"who knows", [(DEAD_LETTER, b"{}")]), record(8, b"s", b"who knows", []))
    assert [letter.info.reason for letter in found.values()] == ["unreadable", "unreadable"]
    letter = found[LetterNumber(3, 8)]
    assert in_full(letter, b"who knows", full=False)["payload"]["begins"] == "who knows"
    with pytest.raises(InvalidInputError, match="no topic of the registry"):
        redrive_records(letter, b"who knows", SETTINGS)


def test_filters_choose() -> None:
    found = letters_of(
        letter_record(0),
        letter_record(1, COMPLETIONS, key=b"other"),
        letter_record(2, error=PoisonRecordError("conflict", "")),
        letter_record(3),
        decision_record(4, "dropped", of=3),
    )

    def numbers(*names: str, **options: str | None) -> list[int]:
        given = {name: options.get(name) for name in ("stage", "reason", "topic", "key", "since", "state")}
        wanted = letter_filter(names, *given.values(), now=10_000.0)
        return [letter.number.offset for letter in select_letters(found, wanted)]

    assert numbers() == [0, 1, 2, 3]
    assert numbers(state="open") == [0, 1, 2]
    assert numbers(reason="malformed", topic="built") == [0, 3]
    assert numbers(key="other") == [1]
    assert numbers(stage="builder") == []
    assert numbers(since="7000s") == [2, 3]
    assert numbers("3:2", "3:0") == [0, 2]
    with pytest.raises(InvalidInputError, match="no dead letter 3:17"):
        numbers("3:17")
    with pytest.raises(InvalidInputError, match="unknown state"):
        numbers(state="gone")


@pytest.mark.parametrize("text", ["3", "3:", ":4", "a:b", "3:4:5", "-1:2"])
def test_a_number_is_partition_and_offset(text: str) -> None:
    with pytest.raises(InvalidInputError, match="no number of a dead letter"):
        LetterNumber.parse(text)


def test_moments() -> None:
    assert parse_time("90s", 1000.0) == 910.0
    assert parse_time("1.5h", 10_000.0) == 4600.0
    assert parse_time("1970-01-01T01:00", 0.0) == 3600.0
    assert parse_time("1970-01-01T01:00+01:00", 0.0) == 0.0
    with pytest.raises(InvalidInputError, match="is no time"):
        parse_time("yesterday", 0.0)


def test_re_driving_reopens_what_the_death_had_closed() -> None:
    (letter,) = letters_of(letter_record(0)).values()
    driven, reopened = redrive_records(letter, b"as received", SETTINGS)
    assert (driven.topic, driven.key, driven.value) == ("t.built", b"s", b"as received")
    assert driven.partition == partition_of(b"s", 8)
    word = decode(TokenDisposition, reopened.value, reopened.headers)
    assert (word.disposition, word.units) == (Disposition.REOPENED, UNITS)
    assert reopened.topic == "t.outcomes"


def test_units_that_another_record_holds_are_not_reopened() -> None:
    held = PoisonRecordError("conflict", "known with other content", units_held=True)
    (letter,) = letters_of(letter_record(0, error=held)).values()
    assert [item.topic for item in redrive_records(letter, b"", SETTINGS)] == ["t.built"]


def test_a_record_of_a_single_partition_goes_back_there() -> None:
    received = InputRecord(POLICIES, 0, 4, b"policy", b"{", ())
    emit = dead_letter(received, "batcher", PoisonRecordError("malformed", "")).records[0]
    (letter,) = letters_of(record(0, b"policy", b"{", emit.headers)).values()
    assert [(item.topic, item.partition) for item in redrive_records(letter, b"{", SETTINGS)] == [("t.policies", 0)]


def test_a_letter_in_full_shows_payload_and_units() -> None:
    value = b'{"type": "session_opened", "session_id": "s"}'
    (letter,) = letters_of(letter_record(0, COMPLETIONS, value=value)).values()
    shown = in_full(letter, value, full=False)
    assert shown["payload"]["value"]["session_id"] == "s"
    assert shown["manifest"] == {"units": 1, "tokens": 7}
    assert shown["headers"]["trace"] == "x"
    broken = in_full(letter, b"{\xff", full=False)
    assert (broken["payload"]["begins"], "malformed" in broken["payload"]["undecodable"]) == ("{\\xff", True)
    json.dumps(shown)


def test_the_list_has_a_line_per_letter() -> None:
    lines = table(list(letters_of(letter_record(0), letter_record(12)).values())).splitlines()
    assert lines[1].split() == [
        "3:0", "1970-01-01T00:16:40+00:00", "reward-merger", "malformed", "built/3@41", "s", "11", "open",
    ]  # fmt: skip
    assert len(lines) == 3


def test_tail_shows_a_decision() -> None:
    shown = json.loads(line(DEAD_LETTERS, decision_record(5, "dropped", of=1)))
    assert (shown["decision"]["decision"], shown["decision"]["why"]) == ("dropped", "a test")
    assert LetterState(shown["decision"]["decision"]) is LetterState.DROPPED
