"""The balance of a prefix, read from its topics, once or again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import TokenDisposition
from rollmill.ops.ledger.balance import Balance
from rollmill.ops.ledger.in_flight import held
from rollmill.ops.ledger.lineage import read_rewound
from rollmill.ops.ledger.log_reader import Log
from rollmill.ops.ledger.reconciliation import Reconciliation
from rollmill.settings import KafkaSettings
from rollmill.topics import OUTCOMES

PAUSE_SECONDS = 0.5


@dataclass
class LedgerReader:
    """Looks at a prefix. Outcomes that an earlier look has booked are not read again."""

    settings: KafkaSettings
    takes: Callable[[TokenDisposition], bool] = lambda _outcome: True
    """Whether an outcome is of a session that is balanced."""
    _accounts: Reconciliation = field(default_factory=Reconciliation)
    _positions: Mapping[int, int] | None = None
    _unreadable: int = 0

    async def look(self) -> Balance:
        """The balance now. Exact on a running system, too.

        Tokens captured when the reading begins are balanced: first the outcomes are read, then what is held, then
        the outcomes that came meanwhile, for a token that was on its way has either been seen held or has its
        disposition.
        """
        async with Log.open(self.settings) as log:
            await self._book(log)
            seen = self._accounts.booked
            manifests = [manifest async for manifest in held(log)]
            await self._book(log)
            # Last, because a rewind is written before what is trained again.
            rewound = await read_rewound(log)
        balance = self._accounts.balance(manifests, rewound, until=seen)
        balance.unreadable = self._unreadable
        return balance

    async def _book(self, log: Log) -> None:
        async for record in log.read(OUTCOMES, self._positions):
            try:
                outcome: TokenDisposition = decode(TokenDisposition, record.value, tuple(record.headers))
            except PoisonRecordError:
                self._unreadable += 1
            else:
                self._take(outcome)
        self._positions = await log.positions()

    def _take(self, outcome: TokenDisposition) -> None:
        if self.takes(outcome):
            self._accounts.book(outcome)


async def read_balance(settings: KafkaSettings) -> Balance:
    """The balance now, see `LedgerReader.look`."""
    return await LedgerReader(settings).look()


async def balances(settings: KafkaSettings, pause: float = PAUSE_SECONDS) -> AsyncIterator[Balance]:
    """The balance, again and again, with ``pause`` seconds between two looks."""
    reader = LedgerReader(settings)
    while True:
        yield await reader.look()
        await asyncio.sleep(pause)


async def settled_balance(settings: KafkaSettings, timeout: float = 60.0) -> Balance:  # noqa: ASYNC109  # no cancelling
    """The balance once nothing is pending, or as it is after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    async for balance in balances(settings):
        if not balance.total.pending or time.monotonic() >= until:
            return balance
    raise RuntimeError("looking at the ledger has no end of its own")
