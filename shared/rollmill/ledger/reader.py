"""The balance of a prefix at one moment, read from its topics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.ledger.accounts import Accounts
from rollmill.ledger.balance import Balance
from rollmill.ledger.holdings import held
from rollmill.ledger.lineage import read_rewound
from rollmill.ledger.log import Log
from rollmill.models import Outcome
from rollmill.settings import KafkaSettings
from rollmill.topics import OUTCOMES

PAUSE_SECONDS = 0.5


async def read_balance(settings: KafkaSettings) -> Balance:
    """The balance now. Exact on a running system, too.

    Tokens captured when the reading begins are balanced: first the outcomes are read, then what is held, then the
    outcomes that came meanwhile, for a token that was on its way has either been seen held or has its disposition.
    """
    accounts = Accounts()
    async with Log.open(settings) as log:
        unreadable = await _book(log, accounts, None)
        seen = await log.positions()
        manifests = [manifest async for manifest in held(log)]
        unreadable += await _book(log, accounts, seen)
        # Last, because a rewind is written before what is trained again.
        rewound = await read_rewound(log)
    balance = accounts.balance(manifests, rewound)
    balance.unreadable = unreadable
    return balance


async def settled_balance(settings: KafkaSettings, timeout: float = 60.0) -> Balance:  # noqa: ASYNC109  # no cancelling
    """The balance once nothing is pending, or as it is after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    balance = await read_balance(settings)
    while balance.total.pending and time.monotonic() < until:
        await asyncio.sleep(PAUSE_SECONDS)
        balance = await read_balance(settings)
    return balance


async def _book(log: Log, accounts: Accounts, starts: Mapping[int, int] | None) -> int:
    """Book the outcomes from ``starts`` on; returns how many records cannot be read."""
    unreadable = 0
    async for record in log.read(OUTCOMES, starts):
        try:
            outcome: Outcome = decode(Outcome, record.value, tuple(record.headers))
        except PoisonRecordError:
            unreadable += 1
        else:
            accounts.book(outcome, late=starts is not None)
    return unreadable
