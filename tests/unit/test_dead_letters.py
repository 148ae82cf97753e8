"""A dead letter keeps the record as it came, closes its account where that is open, and has a limit."""

from __future__ import annotations

import pytest

from rollmill.codec import DEAD_LETTER, JSON, decode, header, manifest_header
from rollmill.errors import FatalError, PoisonRecordError
from rollmill.models import DeadLetterInfo, Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.runtime.stream import InputRecord
from rollmill.runtime.stream.dead_letters import DeadLetterBudget, dead_letter
from rollmill.topics import BUILT, DEAD_LETTERS, OUTCOMES

UNITS = (TokenRange("c1", 0, 0, 7, PolicyVersion(0, 3)),)
MANIFEST = Manifest(session_id="s", attempt=2, units=UNITS)
RECORD = InputRecord(BUILT, 3, 41, b"s", b"\xc1garbage", (("trace", b"x"), manifest_header(MANIFEST)))


def test_it_says_what_came_from_where_and_why() -> None:
    effects = dead_letter(RECORD, "reward-merger", PoisonRecordError("malformed", "no MessagePack"))
    letter = effects.records[0]
    assert (letter.topic, letter.key, letter.value, letter.partition) == (DEAD_LETTERS, "s", RECORD.value, 3)
    info = decode(DeadLetterInfo, header(letter.headers, DEAD_LETTER), (("content-type", JSON.encode()),))
    assert (info.reason, info.error, info.stage) == ("malformed", "no MessagePack", "reward-merger")
    assert (info.topic, info.partition, info.offset) == ("built", 3, 41)
    assert header(letter.headers, "trace") == b"x"


def test_the_units_it_carries_are_dead_lettered_unread() -> None:
    (_, emit) = dead_letter(RECORD, "reward-merger", PoisonRecordError("malformed", "")).records
    fate = emit.value
    assert emit.topic is OUTCOMES
    assert isinstance(fate, TokenDisposition)
    assert (fate.disposition, fate.session_id, fate.attempt) == (Disposition.DEAD_LETTERED, "s", 2)
    assert (fate.units, fate.reason, fate.tokens) == (UNITS, "malformed", 7)


def test_units_that_an_accepted_record_holds_stay_with_it() -> None:
    conflict = PoisonRecordError("conflict", "known with other content", units_held=True)
    assert [emit.topic for emit in dead_letter(RECORD, "batcher", conflict).records] == [DEAD_LETTERS]


def test_a_record_without_key_or_value_is_kept_all_the_same() -> None:
    bare = InputRecord(BUILT, 0, 1, b"", None)
    (letter,) = dead_letter(bare, "batcher", PoisonRecordError("tombstone", "")).records
    assert (letter.key, letter.value) == ("built-0", b"")


def test_the_budget_leaks_with_good_records_and_stops_above_its_limit() -> None:
    budget = DeadLetterBudget(limit=2, leak=10)
    budget = budget.after(dead=True).after(dead=True)
    for _ in range(10):
        budget = budget.after(dead=False)
    assert budget.level == pytest.approx(1.0)
    budget = budget.after(dead=True)
    with pytest.raises(FatalError, match="more than 2 dead letters"):
        budget.after(dead=True)
