"""A dead letter keeps the record as it came, closes its account where that is open, and has a limit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rollmill.codec import DEAD_LETTER, JSON, decode, header, manifest_header
from rollmill.errors import OWN_FAULTS, PoisonRecordError
from rollmill.models import DeadLetterInfo, Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.runtime.stream import InputRecord
from rollmill.runtime.stream.dead_letters import DeadLetterBudget, DeadLetterLimitError, dead_letter
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


OURS = PoisonRecordError("stage_error", "")
THEIRS = PoisonRecordError("conflict", "")


def keyed(number: int) -> InputRecord:
    return InputRecord(BUILT, 0, number, b"s-%d" % number, b"")


def test_the_budget_leaks_with_good_records_and_stops_above_its_limit() -> None:
    budget = DeadLetterBudget(limit=2, leak=10)
    budget = budget.after(OURS, keyed(0)).after(OURS, keyed(1))
    for _ in range(10):
        budget = budget.after_success()
    assert budget.level == pytest.approx(1.0)
    budget = budget.after(OURS, keyed(2))
    with pytest.raises(DeadLetterLimitError, match="more than 2 dead letters"):
        budget.after(OURS, keyed(3))


def test_f2_one_key_counts_once_until_the_budget_is_empty_again() -> None:
    budget = DeadLetterBudget(limit=2, leak=1)
    for _ in range(10):
        budget = budget.after(OURS, keyed(7))
    assert budget.level == 1
    budget = budget.after_success()
    assert (budget.level, budget.keys) == (0, ())
    assert budget.after(OURS, keyed(7)).level == 1


def test_f2_what_a_client_causes_never_counts() -> None:
    budget = DeadLetterBudget(limit=1, leak=1)
    for number in range(500):
        budget = budget.after(THEIRS, keyed(number))
    assert budget == DeadLetterBudget(limit=1, leak=1)


def test_nt06_the_limit_names_each_reason_by_count_with_its_first_source() -> None:
    budget = DeadLetterBudget(limit=2, leak=1)
    budget = budget.after(OURS, keyed(4)).after(PoisonRecordError("outputs_refused", ""), keyed(5))
    with pytest.raises(DeadLetterLimitError) as stopped:
        budget.after(OURS, keyed(6))
    assert "2 x stage_error (first at built/0@4), 1 x outputs_refused (first at built/0@5)" in str(stopped.value)


CLIENTS_REASONS = {
    "conflict",
    "corrupt_blob",
    "invalid",
    "late_evaluation",
    "malformed",
    "missing_blob",
    "no_blob_store",
    "settings_changed",
    "step_gone",
    "tombstone",
    "too_large",
    "too_many_evaluations",
    "too_old",
    "unknown_content_type",
    "unknown_rank",
    "unknown_step",
    "unknown_strategy",
    "unredeemed",
    "wrong_partition",
}
"""What the content of a record alone can cause, written by whoever may write to a topic."""
OPERATORS_REASONS = {"set_aside", "skipped"}
"""What a person has decided."""


def reasons_in_the_code() -> set[str]:
    found = set()
    for root in ("shared", "services"):
        for path in (Path(__file__).parents[2] / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "PoisonRecordError":
                    reason = node.args[0]
                    if isinstance(reason, ast.Constant):
                        found.add(str(reason.value))
                    else:
                        assert ast.unparse(reason) == "error.reason", f"{path}: a reason is written where it is raised"
    return found


def test_f2_every_reason_in_the_code_has_its_class() -> None:
    assert reasons_in_the_code() == CLIENTS_REASONS | OPERATORS_REASONS | OWN_FAULTS
    assert not CLIENTS_REASONS & OWN_FAULTS
    assert all(PoisonRecordError(reason, "").own_fault for reason in OWN_FAULTS)
    assert not any(PoisonRecordError(reason, "").own_fault for reason in CLIENTS_REASONS | OPERATORS_REASONS)
