"""A trainer that goes back to a checkpoint: the lineage of what it loaded is what counts."""

from __future__ import annotations

from rollmill.models import (
    Disposition,
    EndOfStream,
    PolicyVersion,
    Rewound,
    StepAcknowledged,
    TokenDisposition,
    TokenRange,
    outcome,
)
from rollmill.ops.ledger import Reconciliation, Totals
from rollmill.ops.ledger.reader import Lineage

UNIT = TokenRange("c1", 0, 0, 5, PolicyVersion(0, 1))


def word(disposition: Disposition, batch: str | None = None, reason: str | None = None) -> TokenDisposition:
    return outcome(
        disposition, stage="trainer", session_id="s", attempt=1, units=(UNIT,), reason=reason, batch_id=batch
    )


CAPTURED = word(Disposition.CAPTURED)


def trained(batch: str = "b1") -> TokenDisposition:
    return word(Disposition.TRAINED, batch)


def stale(batch: str = "b1") -> TokenDisposition:
    return word(Disposition.EXCLUDED, batch, "stale_at_hand_over")


def totals(*words: TokenDisposition, **rewound: int) -> Totals:
    accounts = Reconciliation()
    for each in (CAPTURED, *words):
        accounts.book(each)
    return accounts.balance((), rewound).total


def test_a_batch_taken_back_may_come_to_another_end() -> None:
    found = totals(trained(), stale(), b1=1)
    assert (found.trained, dict(found.excluded), found.doubled) == (0, {"stale_at_hand_over": 5}, 0)
    assert totals(trained(), stale()).doubled == 5


def test_the_last_word_counts_also_where_it_was_said_before() -> None:
    found = totals(trained(), stale(), trained(), b1=2)
    assert (found.trained, found.excluded.total(), found.doubled) == (5, 0, 0)
    assert totals(trained(), stale(), trained(), b1=1).doubled == 5


def test_another_batch_is_a_double_whatever_was_taken_back() -> None:
    assert totals(trained("b1"), trained("b2"), b1=1).doubled == 5
    assert totals(trained("b1"), trained("b1"), b1=1).doubled == 0


def test_a_rewind_alone_changes_nothing() -> None:
    assert totals(trained(), b1=3).trained == 5


def acknowledged(step: int, rank: int = 0, run: str = "run") -> StepAcknowledged:
    return StepAcknowledged(run=run, rank=rank, world_size=2, step=step, batch_id=f"{run}-{step}", at=1.0)


def rewound(*events: StepAcknowledged | Rewound | EndOfStream) -> dict[str, int]:
    lineage = Lineage()
    for event in events:
        lineage.take(event)
    return lineage.rewound


def back(next_step: int, rank: int | None = 0, run: str = "run") -> Rewound:
    return Rewound(run=run, next_step=next_step, rank=rank, at=2.0)


def test_only_acknowledged_steps_are_taken_back() -> None:
    events = [acknowledged(step) for step in range(3)]
    assert rewound(*events, back(1)) == {"run-1": 1, "run-2": 1}
    assert rewound(*events, back(1), back(0)) == {"run-0": 1, "run-1": 1, "run-2": 1}
    assert rewound(*events, back(2), acknowledged(2), back(2)) == {"run-2": 2}
    assert rewound(*events, back(3), EndOfStream(run="run", at=3.0)) == {}


def test_each_rank_and_each_run_speaks_for_itself() -> None:
    events = [acknowledged(0), acknowledged(0, rank=1), acknowledged(0, run="other")]
    assert rewound(*events, back(0, rank=1)) == {"run-0": 1}
    assert rewound(*events, back(0, rank=None), acknowledged(0, rank=1), back(0, rank=1)) == {"run-0": 2}
