from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.models import Disposition, Manifest, PolicyVersion, TokenRange, outcome
from rollmill.ops.ledger import Reconciliation

LENGTH = 12
FATES = st.sampled_from(["trained", "stale", "aux", "dead", "pending", "lost"])
DISPOSITIONS = {
    "trained": (Disposition.TRAINED, None),
    "stale": (Disposition.EXCLUDED, "stale"),
    "aux": (Disposition.EXCLUDED, "aux"),
    "dead": (Disposition.DEAD_LETTERED, "invalid"),
}


def one(position: int) -> TokenRange:
    return TokenRange("c", 0, position, position + 1, PolicyVersion(0, position // 4))


@given(st.lists(FATES, min_size=LENGTH, max_size=LENGTH), st.randoms(use_true_random=False))
def test_the_ledger_agrees_with_counting_token_by_token(fates: list[str], random: object) -> None:
    words = [
        outcome(kind, stage="t", session_id="s", attempt=1, units=(one(position),), reason=reason)
        for position, fate in enumerate(fates)
        if fate in DISPOSITIONS
        for kind, reason in [DISPOSITIONS[fate]]
    ]
    random.shuffle(words)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    accounts = Reconciliation()
    versions = tuple(
        TokenRange("c", 0, start, start + 4, PolicyVersion(0, start // 4)) for start in range(0, LENGTH, 4)
    )
    accounts.book(outcome(Disposition.CAPTURED, stage="t", session_id="s", attempt=1, units=versions))
    for word in words:
        accounts.book(word)
    held = [
        Manifest(session_id="s", units=(one(position),)) for position, fate in enumerate(fates) if fate == "pending"
    ]
    balance = accounts.balance(held)
    assert balance.total.captured == balance.total.accounted == LENGTH
    assert balance.total.doubled == 0
    assert balance.total.trained == fates.count("trained")
    assert balance.total.excluded["stale"] == fates.count("stale")
    assert balance.total.dead_lettered["invalid"] == fates.count("dead")
    assert (balance.total.pending, balance.total.lost) == (fates.count("pending"), fates.count("lost"))
    assert sum(totals.captured for totals in balance.by_version.values()) == LENGTH
    assert [(count, totals) for _, count, totals in balance.lengths()] == [(1, balance.total)]
