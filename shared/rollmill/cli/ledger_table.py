"""The ledger as a table for people: one row per policy version, and the totals."""

from __future__ import annotations

from collections import Counter

from rollmill.ledger import Balance, Totals

HEAD = ("version", "captured", "trained", "excluded", "dead", "pending", "lost", "doubled")


def ledger_table(balance: Balance) -> str:
    """Columns of tokens, then the reasons, then the verdict."""
    rows = [(str(version), totals) for version, totals in sorted(balance.by_version.items())]
    lines = [_columns(HEAD), *(_row(name, totals) for name, totals in [*rows, ("all", balance.total)])]
    lines += _reasons("excluded", balance.total.excluded) + _reasons("dead-lettered", balance.total.dead_lettered)
    return "\n".join([*lines, _verdict(balance)])


def _row(name: str, totals: Totals) -> str:
    dead = totals.dead_lettered.total()
    numbers = (totals.captured, totals.trained, totals.excluded.total(), dead)
    return _columns((name, *map(str, (*numbers, totals.pending, totals.lost, totals.doubled))))


def _columns(cells: tuple[str, ...]) -> str:
    return " ".join(f"{cell:>10}" for cell in cells)


def _reasons(disposition: str, reasons: Counter[str]) -> list[str]:
    return [f"{disposition} ({reason}): {tokens}" for reason, tokens in sorted(reasons.items())]


def _verdict(balance: Balance) -> str:
    if balance.balanced:
        return "balanced: nothing lost, nothing doubled"
    total = balance.total
    tokens = f"lost {total.lost}, doubled {total.doubled}, never captured {total.uncaptured}"
    return f"NOT balanced: {tokens} tokens; unreadable outcomes: {balance.unreadable}"
