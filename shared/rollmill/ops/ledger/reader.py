"""The balance of a prefix, read from its topics, once or repeatedly."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import Rewound, StepAcknowledged, StepsResharded, TokenDisposition, TrainerEvent
from rollmill.ops.ledger.balance import Balance
from rollmill.ops.ledger.in_flight import BuilderState, in_flight
from rollmill.ops.ledger.reconciliation import Reconciliation
from rollmill.ops.ledger.unread_calls import RefusedCalls, UnreadCalls
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.topics import ACKS, COMPLETIONS, OUTCOMES

PAUSE_SECONDS = 0.5


@dataclass
class LedgerReader:
    """Looks at a prefix. Outcomes that an earlier look has booked are not read again."""

    settings: KafkaSettings
    takes: Callable[[str, int], bool] = lambda _session_id, _attempt: True
    """Whether an attempt of a session is balanced at all."""
    _reconciliation: Reconciliation = field(default_factory=Reconciliation)
    _positions: Mapping[int, int] | None = None
    _unreadable: int = 0
    _builder: BuilderState = field(default_factory=BuilderState)

    def __post_init__(self) -> None:
        claim_check = ClaimCheck.of(self.settings)
        self._unread, self._refused = UnreadCalls(claim_check), RefusedCalls(claim_check)

    async def look(self) -> Balance:
        """The balance now. Exact on a running system, too.

        Tokens that were in the log when the reading begins are balanced: first the calls that the builder has not
        read, then the outcomes, then what is in flight, then the outcomes that came meanwhile. So a token has been
        seen unread, has been seen in flight, or has its disposition.
        """
        async with Log.open(self.settings) as log:
            await self._builder.follow(log)
            waiting = await self._unread.look(log, self._builder.state.starts(COMPLETIONS))
            await self._book(log)
            seen = self._reconciliation.booked
            manifests = [manifest async for manifest in in_flight(log, self._builder)]
            refused = await self._refused.look(log)
            await self._book(log)
            # Last, because a rewind is written before what is trained again.
            rewound = await read_rewound(log)
        unread = [call for call in (*waiting, *refused) if self.takes(call.session_id, call.attempt)]
        balance = self._reconciliation.balance(manifests, rewound, until=seen, unread=unread)
        balance.unreadable, balance.uncounted = self._unreadable, self._unread.uncounted
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
        if self.takes(outcome.session_id, outcome.attempt):
            self._reconciliation.book(outcome)


async def read_balance(settings: KafkaSettings) -> Balance:
    """The balance now, see `LedgerReader.look`."""
    return await LedgerReader(settings).look()


async def balances(settings: KafkaSettings, pause: float = PAUSE_SECONDS) -> AsyncIterator[Balance]:
    """The balance, repeatedly, with ``pause`` seconds between two looks."""
    reader = LedgerReader(settings)
    while True:
        yield await reader.look()
        await asyncio.sleep(pause)


async def settled_balance(settings: KafkaSettings, timeout: float = 60.0) -> Balance:  # noqa: ASYNC109  # no cancelling
    """The balance once nothing is on its way, or as it is after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    async for balance in balances(settings):
        if balance.settled or time.monotonic() >= until:
            return balance
    raise RuntimeError("looking at the ledger has no end of its own")


@dataclass
class Lineage:
    """Which acknowledged batches were taken back, because a trainer went back to a checkpoint (rule R3).

    Folds the topic ``acks`` in its order.
    """

    _acknowledged: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)
    """By run and rank: batch ids by step."""
    _rewound: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By batch id and rank."""

    def take(self, event: TrainerEvent) -> None:
        if isinstance(event, StepAcknowledged):
            self._acknowledged.setdefault((event.run, event.rank), {})[event.step] = event.batch_id
        if isinstance(event, Rewound | StepsResharded):
            for (run, rank), batches in self._acknowledged.items():
                if run == event.run and (isinstance(event, StepsResharded) or event.rank in (None, rank)):
                    self._take_back(rank, batches, event.next_step)

    def _take_back(self, rank: int, batches: dict[int, str], next_step: int) -> None:
        for step in [step for step in batches if step >= next_step]:
            self._rewound[batches.pop(step), rank] += 1

    @property
    def rewound(self) -> dict[str, int]:
        """How often a batch was taken back, by its id. Of several ranks the highest number counts."""
        most: dict[str, int] = {}
        for (batch_id, _), count in self._rewound.items():
            most[batch_id] = max(count, most.get(batch_id, 0))
        return most


async def read_rewound(log: Log) -> dict[str, int]:
    lineage = Lineage()
    async for record in log.read(ACKS):
        with suppress(PoisonRecordError):  # the batcher writes it to the dead letters
            lineage.take(decode(ACKS.model, record.value, tuple(record.headers)))
    return lineage.rewound
