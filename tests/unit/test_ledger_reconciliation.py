from __future__ import annotations

from typing import Any

import pytest

from rollmill.cli.ledger.console import ledger_table
from rollmill.models import Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange, outcome
from rollmill.ops.ledger import Balance, Reconciliation
from rollmill.ops.ledger.unread_calls import UnreadCall, claimed_call

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


def unit(start: int, stop: int, *, completion: str = "c1", version: PolicyVersion = V1) -> TokenRange:
    return TokenRange(completion, 0, start, stop, version)


def word(
    disposition: Disposition,
    *units: TokenRange,
    reason: str | None = None,
    batch: str | None = None,
    session: str = "s1",
) -> TokenDisposition:
    return outcome(
        disposition, stage="test", session_id=session, attempt=1, units=units, reason=reason, batch_id=batch, at=1.0
    )


def captured(*units: TokenRange) -> TokenDisposition:
    return word(Disposition.CAPTURED, *units)


def trained(*units: TokenRange, batch: str = "b1") -> TokenDisposition:
    return word(Disposition.TRAINED, *units, batch=batch)


def excluded(*units: TokenRange, reason: str = "stale") -> TokenDisposition:
    return word(Disposition.EXCLUDED, *units, reason=reason)


def dead(*units: TokenRange) -> TokenDisposition:
    return word(Disposition.DEAD_LETTERED, *units, reason="invalid")


def reopened(*units: TokenRange) -> TokenDisposition:
    return word(Disposition.REOPENED, *units, reason="re_driven")


def holding(*units: TokenRange) -> Manifest:
    return Manifest(session_id="s1", units=units)


def balance(*words: TokenDisposition, held: tuple[Manifest, ...] = ()) -> Balance:
    accounts = Reconciliation()
    for each in words:
        accounts.book(each)
    return accounts.balance(held)


def test_every_captured_token_has_exactly_one_fate() -> None:
    found = balance(
        captured(unit(0, 10)),
        trained(unit(0, 4)),
        excluded(unit(4, 6)),
        dead(unit(6, 7)),
        held=(holding(unit(7, 9)),),
    ).total
    assert (found.captured, found.trained, found.pending, found.lost) == (10, 4, 2, 1)
    assert dict(found.excluded) == {"stale": 2}
    assert dict(found.dead_lettered) == {"invalid": 1}
    assert found.accounted == found.captured


def test_tokens_without_a_fate_are_lost_unless_they_are_held() -> None:
    assert balance(captured(unit(0, 5))).total.lost == 5
    assert balance(captured(unit(0, 5)), held=(holding(unit(0, 5)),)).total.pending == 5


def test_what_is_disposed_is_not_pending_although_it_is_still_held() -> None:
    found = balance(captured(unit(0, 5)), trained(unit(0, 5)), held=(holding(unit(0, 5)),)).total
    assert (found.trained, found.pending) == (5, 0)


def test_two_batches_with_one_token_are_a_double() -> None:
    found = balance(captured(unit(0, 5)), trained(unit(0, 5), batch="b1"), trained(unit(4, 5), batch="b2"))
    assert found.total.doubled == 1
    assert not found.balanced
    assert found.total.accounted == found.total.captured == 5


def test_trained_and_excluded_is_a_double() -> None:
    assert balance(captured(unit(0, 3)), trained(unit(0, 3)), excluded(unit(0, 2))).total.doubled == 2


def test_capturing_again_is_a_double_also_under_the_same_outcome_id() -> None:
    assert balance(captured(unit(0, 3)), captured(unit(0, 3)), trained(unit(0, 3))).total.doubled == 3


def test_the_same_acknowledgement_twice_is_one() -> None:
    assert balance(captured(unit(0, 3)), trained(unit(0, 3)), trained(unit(0, 3))).balanced


def test_a_redriven_dead_letter_may_be_trained() -> None:
    found = balance(captured(unit(0, 3)), dead(unit(0, 3)), reopened(unit(0, 3)), trained(unit(0, 3)))
    assert found.balanced
    assert found.total.trained == 3
    assert not found.total.dead_lettered


def test_a_redriven_dead_letter_may_die_again() -> None:
    found = balance(captured(unit(0, 3)), dead(unit(0, 3)), reopened(unit(0, 3)), dead(unit(0, 3)))
    assert found.balanced
    assert dict(found.total.dead_lettered) == {"invalid": 3}


def test_a_reopened_token_must_be_held_somewhere() -> None:
    assert balance(captured(unit(0, 3)), dead(unit(0, 3)), reopened(unit(0, 3))).total.lost == 3


def test_reopening_once_does_not_forgive_two_trainings() -> None:
    words = (captured(unit(0, 3)), dead(unit(0, 3)), reopened(unit(0, 3)))
    assert balance(*words, trained(unit(0, 3), batch="b1"), trained(unit(0, 3), batch="b2")).total.doubled == 3


def test_a_disposition_of_tokens_never_captured_is_not_balanced() -> None:
    found = balance(trained(unit(0, 3)))
    assert (found.total.captured, found.total.trained, found.total.uncaptured) == (0, 0, 3)
    assert not found.balanced


def test_numbers_are_also_kept_by_policy_version() -> None:
    found = balance(captured(unit(0, 2), unit(2, 5, version=V2)), trained(unit(0, 2)), excluded(unit(2, 5, version=V2)))
    assert (found.by_version[V1].captured, found.by_version[V1].trained) == (2, 2)
    assert (found.by_version[V2].captured, dict(found.by_version[V2].excluded)) == (3, {"stale": 3})
    assert list(found.as_json()["by_version"]) == ["0:1", "0:2"]


def test_replies_of_one_session_do_not_mix() -> None:
    found = balance(captured(unit(0, 2), unit(0, 2, completion="c2")), trained(unit(0, 2))).total
    assert (found.trained, found.lost) == (2, 2)


def test_what_was_captured_after_the_holdings_were_read_is_not_balanced_yet() -> None:
    accounts = Reconciliation()
    accounts.book(captured(unit(0, 2)))
    seen = accounts.booked
    accounts.book(captured(unit(0, 3, completion="c2")))
    accounts.book(excluded(unit(0, 1, completion="c2")))
    accounts.book(trained(unit(0, 2)))
    found = accounts.balance(until=seen)
    assert found.balanced
    assert (found.total.captured, found.total.trained) == (2, 2)
    assert accounts.balance().total.captured == 5


def test_a_rule_that_drops_long_sessions_shows_by_length() -> None:
    accounts = Reconciliation()
    for name, length in (("s1", 256), ("s2", 257), ("s3", 70_000)):
        half = (unit(0, length - 1), unit(length - 1, length))
        accounts.book(word(Disposition.CAPTURED, *half, session=name))
        accounts.book(word(Disposition.TRAINED if length < 1000 else Disposition.EXCLUDED, half[0], session=name))
        accounts.book(word(Disposition.EXCLUDED, half[1], session=name, reason="stale"))
    found = accounts.balance()
    rows = {name: (count, totals.trained, totals.excluded.total()) for name, count, totals in found.lengths()}
    assert rows == {"to_256": (1, 255, 1), "to_1024": (1, 256, 1), "above_65536": (1, 0, 70_000)}
    assert sum(totals.captured for totals in found.by_length.values()) == found.total.captured
    assert list(found.as_json()["by_length"]) == list(rows)


def test_a_session_is_as_long_as_all_its_calls_together() -> None:
    found = balance(captured(unit(0, 200)), captured(unit(0, 200, completion="c2")), trained(unit(0, 200)))
    assert [(name, count) for name, count, _ in found.lengths()] == [("to_1024", 1)]


def unread(*units: TokenRange, refused: str | None = None, at: float = 0.0) -> UnreadCall:
    return UnreadCall("s1", 1, units, at, refused)


def test_f13_an_unread_call_is_pending_until_its_capture_is_balanced() -> None:
    accounts = Reconciliation()
    accounts.book(captured(unit(0, 3)))
    for until, pending in ((0, 3), (1, 0)):
        found = accounts.balance(until=until, unread=[unread(unit(0, 3))]).total
        assert (found.captured, found.pending, found.lost) == (3, pending, 3 - pending)


def test_f13_a_refused_call_is_dead_lettered_unless_another_of_its_name_waits_or_was_captured() -> None:
    letter = unread(unit(0, 5), refused="invalid")
    assert dict(Reconciliation().balance(unread=[letter, letter]).total.dead_lettered) == {"invalid": 5}
    waiting = Reconciliation().balance(unread=[unread(unit(0, 3)), letter]).total
    assert (waiting.captured, waiting.pending, waiting.dead_lettered.total()) == (3, 3, 0)
    accounts = Reconciliation()
    accounts.book(captured(unit(0, 3)))
    assert accounts.balance([holding(unit(0, 3))], unread=[letter]).total.captured == 3


def test_f13_the_age_of_pending_tokens_is_that_of_the_first_one() -> None:
    first, second = unread(unit(0, 3), at=20.0), unread(unit(0, 2, completion="c2"), at=10.0)
    found = Reconciliation().balance(unread=[first, second, unread(unit(0, 1, completion="c3"))])
    assert found.pending_since == 10.0
    assert [(item.session_id, item.tokens, item.since) for item in found.oldest(5)] == [("s1", 6, 10.0)]
    assert balance(captured(unit(0, 3)), trained(unit(0, 3))).pending_since is None


@pytest.mark.parametrize(
    ("record", "tokens"),
    [
        ({"choices": [{"token_ids": [1, 2], "logprobs": [0.0]}]}, 2),
        ({"choices": [{"token_ids": b"\0" * 12, "logprobs": b"\0"}, {"index": -1, "token_ids": [1]}]}, 4),
        ({"choices": "abc"}, 0),
        ({"choices": [None, {"token_ids": 7}], "attempt": "x"}, 0),
        ({"completion_id": "", "choices": [{"token_ids": [1]}]}, None),
        ({"session_id": 7}, None),
    ],
)
def test_f13_the_tokens_of_a_refused_call_are_counted_by_its_own_content(
    record: dict[str, Any], tokens: int | None
) -> None:
    data = {"type": "completion", "session_id": "s", "completion_id": "c", **record}
    found = claimed_call(data)
    assert (None if found is None else sum(unit.tokens for unit in found.units)) == tokens
    assert claimed_call([data]) is None


def test_a_column_of_the_table_is_as_wide_as_its_widest_number() -> None:
    table = ledger_table(balance(captured(unit(0, 10**12)), trained(unit(0, 10**12)))).splitlines()
    assert len({len(line) for line in table[:3]}) == 1
