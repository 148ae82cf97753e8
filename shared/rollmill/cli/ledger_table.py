"""The ledger as tables for people: by policy version, by length of session, by reason, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.ops.ledger import Balance, Totals

HEAD = ("captured", "trained", "excluded", "dead", "pending", "lost", "doubled")


def ledger_table(balance: Balance) -> str:
    """Columns of tokens by version, shares by length, then the reasons, then the verdict."""
    rows = [(str(version), totals) for version, totals in sorted(balance.by_version.items())]
    lines = [_columns(("version", *HEAD)), *(_row(name, totals) for name, totals in [*rows, ("all", balance.total)])]
    return "\n".join([*lines, *_lengths(balance), *_reasons(balance.total), _verdict(balance)])


def _row(name: str, totals: Totals) -> str:
    dead = totals.dead_lettered.total()
    numbers = (totals.captured, totals.trained, totals.excluded.total(), dead)
    return _columns((name, *map(str, (*numbers, totals.pending, totals.lost, totals.doubled))))


def _lengths(balance: Balance) -> list[str]:
    """One line per length bucket: the share of its tokens that trained, and where the others went."""
    if not balance.by_length:
        return []
    head = _columns(("length", "sessions", "captured", "trained"))
    return [head, *(_length(*item) for item in balance.lengths())]


def _length(bucket: str, sessions: int, totals: Totals) -> str:
    shares = ", ".join(f"{reason} {_share(tokens, totals)}" for reason, tokens in _left_out(totals))
    cells = (bucket, str(sessions), str(totals.captured), _share(totals.trained, totals))
    return f"{_columns(cells)}  {shares}".rstrip()


def _left_out(totals: Totals) -> Iterator[tuple[str, int]]:
    """The largest first."""
    yield from totals.excluded.most_common()
    yield from totals.dead_lettered.most_common()
    if totals.pending:
        yield "pending", totals.pending


def _share(tokens: int, totals: Totals) -> str:
    return f"{tokens / totals.captured:.1%}" if totals.captured else "-"


def _columns(cells: tuple[str, ...]) -> str:
    return " ".join(f"{cell:>11}" for cell in cells)


def _reasons(totals: Totals) -> list[str]:
    named = (("excluded", totals.excluded), ("dead-lettered", totals.dead_lettered))
    return [f"{kind} ({reason}): {tokens}" for kind, reasons in named for reason, tokens in sorted(reasons.items())]


def _verdict(balance: Balance) -> str:
    if balance.balanced:
        return "balanced: nothing lost, nothing doubled"
    total = balance.total
    tokens = f"lost {total.lost}, doubled {total.doubled}, never captured {total.uncaptured}"
    return f"NOT balanced: {tokens} tokens; unreadable outcomes: {balance.unreadable}"
