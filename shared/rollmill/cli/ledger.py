"""``rollmill ledger``: once, until nothing is pending, or again and again."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rollmill.cli.ledger_table import ledger_table
from rollmill.ops.ledger import Balance, balances
from rollmill.settings import KafkaSettings

CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor home and clears its screen."""


@dataclass(frozen=True)
class Wanted:
    """What the command was told. ``timeout``: of settling, in seconds; ``pause``: between two looks, in seconds."""

    as_json: bool
    settle: bool
    watch: bool
    timeout: float
    pause: float


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def run(settings: KafkaSettings, wanted: Wanted, show: Callable[[str], None] = _print) -> Balance:
    """Show the balance as it was asked for, and return the last one."""
    last = None
    try:
        async for balance in _looks(settings, wanted):
            last = balance
            if wanted.watch:
                show(_text(balance, wanted, clear=sys.stdout.isatty()))
    except asyncio.CancelledError:  # Ctrl-C is how a watch ends; the exit code says what it saw last
        if not wanted.watch or last is None:
            raise
    if last is None:
        raise RuntimeError("the ledger was not looked at")
    if not wanted.watch:
        show(_text(last, wanted, clear=False))
    return last


async def _looks(settings: KafkaSettings, wanted: Wanted) -> AsyncIterator[Balance]:
    """Ends after one look, or with ``settle`` once nothing is pending; a watch alone has no end."""
    until = time.monotonic() + wanted.timeout
    async for balance in balances(settings, wanted.pause):
        yield balance
        settled = not balance.total.pending or time.monotonic() >= until
        if settled if wanted.settle else not wanted.watch:
            return


def _text(balance: Balance, wanted: Wanted, *, clear: bool) -> str:
    if wanted.as_json:
        return json.dumps(balance.as_json())
    return (CLEAR if clear else "") + ledger_table(balance)
