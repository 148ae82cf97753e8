"""``rollmill ledger`` on a console: once, until nothing is pending, or again and again, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from rollmill.ops.ledger import Balance, Totals, balances
from rollmill.settings import KafkaSettings

CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor home and clears its screen."""
NARROWEST = 11
"""Characters of a column, at least."""
HEAD = ("captured", "trained", "excluded", "dead", "pending", "lost", "doubled")


@dataclass(frozen=True)
class LedgerOptions:
    """Options of the command.

    ``timeout``: of settling, in seconds; ``pause``: between two looks, in seconds; ``oldest``: how many sessions with
    pending tokens are named, those that wait for the longest time first.
    """

    as_json: bool
    settle: bool
    watch: bool
    timeout: float
    pause: float
    oldest: int = 0


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
    """Ends after one look, or with ``settle`` once nothing is on its way; ``watch`` without it never ends."""
    until = time.monotonic() + options.timeout
    async for balance in balances(settings, options.pause):
        yield balance
        settled = balance.settled or time.monotonic() >= until
        if settled if options.settle else not options.watch:
            return


def _text(balance: Balance, options: LedgerOptions, *, clear: bool) -> str:
    if options.as_json:
        oldest = {"oldest": [item.as_json() for item in balance.oldest(options.oldest)]} if options.oldest else {}
        return json.dumps(balance.as_json() | oldest)
    return (CLEAR if clear else "") + ledger_table(balance, options.oldest, time.time())


def ledger_table(balance: Balance, oldest: int = 0, now: float = 0.0) -> str:
    """Columns of tokens by version, shares by length, then the reasons, the ``oldest`` pending ones, the verdict.

    ``now``: seconds since the epoch, from which their age is counted.
    """
    rows = [(str(version), totals) for version, totals in sorted(balance.by_version.items())]
    lines = _columns([("version", *HEAD), *(_row(name, totals) for name, totals in [*rows, ("all", balance.total)])])
    return "\n".join(
        [*lines, *_lengths(balance), *_reasons(balance.total), *_oldest(balance, oldest, now), _verdict(balance)]
    )


def _row(name: str, totals: Totals) -> tuple[str, ...]:
    dead = totals.dead_lettered.total()
    numbers = (totals.captured, totals.trained, totals.excluded.total(), dead)
    return (name, *map(str, (*numbers, totals.pending, totals.lost, totals.doubled)))


def _lengths(balance: Balance) -> list[str]:
    """One line per length bucket: the share of its tokens that trained, and where the others went."""
    if not balance.by_length:
        return []
    shares = [", ".join(_shares(totals)) for _, _, totals in balance.lengths()]
    cells = [
        (bucket, str(sessions), str(totals.captured), _share(totals.trained, totals))
        for bucket, sessions, totals in balance.lengths()
    ]
    head, *lines = _columns([("length", "sessions", "captured", "trained"), *cells])
    return [head, *(f"{line}  {left_out}".rstrip() for line, left_out in zip(lines, shares, strict=True))]


def _shares(totals: Totals) -> list[str]:
    return [f"{reason} {_share(tokens, totals)}" for reason, tokens in _left_out(totals)]


def _left_out(totals: Totals) -> Iterator[tuple[str, int]]:
    """The largest first."""
    yield from totals.excluded.most_common()
    yield from totals.dead_lettered.most_common()
    if totals.pending:
        yield "pending", totals.pending


def _share(tokens: int, totals: Totals) -> str:
    return f"{tokens / totals.captured:.1%}" if totals.captured else "-"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines; a column is as wide as its widest cell."""
    widths = [max(NARROWEST, *map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _oldest(balance: Balance, count: int, now: float) -> list[str]:
    found = [
        (item, "unknown" if not item.since else f"{max(0.0, now - item.since):.0f} s") for item in balance.oldest(count)
    ]
    return [
        f"pending since {age}: {item.tokens} tokens of {item.session_id}, attempt {item.attempt}" for item, age in found
    ]


def _reasons(totals: Totals) -> list[str]:
    named = (("excluded", totals.excluded), ("dead-lettered", totals.dead_lettered))
    return [f"{kind} ({reason}): {tokens}" for kind, reasons in named for reason, tokens in sorted(reasons.items())]


def _verdict(balance: Balance) -> str:
    if balance.balanced:
        return "balanced: nothing lost, nothing doubled" + _uncounted(balance)
    total = balance.total
    tokens = f"lost {total.lost}, doubled {total.doubled}, never captured {total.uncaptured}"
    return f"NOT balanced: {tokens} tokens; unreadable outcomes: {balance.unreadable}" + _uncounted(balance)


def _uncounted(balance: Balance) -> str:
    if not balance.uncounted:
        return ""
    return (
        f"; {balance.uncounted} records that the builder has not read cannot be counted: they are damaged, or in "
        "object storage (set ROLLMILL_CLAIM_CHECK_URL as their writer has it)"
    )
