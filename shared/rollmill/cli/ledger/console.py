"""``rollmill ledger`` on a console: once, until nothing is pending, or again and again, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from rollmill.ops.ledger import Balance, Totals, balances
from rollmill.settings import KafkaSettings

CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor home and clears its screen."""
HEAD = ("captured", "trained", "excluded", "dead", "pending", "lost", "doubled")


@dataclass(frozen=True)
class LedgerOptions:
    """Options of the command. ``timeout``: of settling, in seconds; ``pause``: between two looks, in seconds."""

    as_json: bool
    settle: bool
    watch: bool
    timeout: float
    pause: float


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def run(settings: KafkaSettings, options: LedgerOptions, show: Callable[[str], None] = _print) -> Balance:
    """Print the balance as the options require, and return the last one."""
    last = None
    try:
        async for balance in _looks(settings, options):
            last = balance
            if options.watch:
                show(_text(balance, options, clear=sys.stdout.isatty()))
    except asyncio.CancelledError:  # Ctrl-C ends a watch; the exit code is that of the last balance
        if not options.watch or last is None:
            raise
    if last is None:
        raise RuntimeError("the ledger was not looked at")
    if not options.watch:
        show(_text(last, options, clear=False))
    return last


async def _looks(settings: KafkaSettings, options: LedgerOptions) -> AsyncIterator[Balance]:
    """Ends after one look, or with ``settle`` once nothing is pending; ``watch`` without it never ends."""
    until = time.monotonic() + options.timeout
    async for balance in balances(settings, options.pause):
        yield balance
        settled = not balance.total.pending or time.monotonic() >= until
        if settled if options.settle else not options.watch:
            return


def _text(balance: Balance, options: LedgerOptions, *, clear: bool) -> str:
    if options.as_json:
        return json.dumps(balance.as_json())
    return (CLEAR if clear else "") + ledger_table(balance)


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
