"""One rank's dealings with Kafka: position, steps read ahead, acknowledgements. Lives on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollmill.errors import FatalError
from rollmill.kafka.clients import KafkaClients
from rollmill.kafka.transaction import Outgoing
from rollmill.models import BatchHeader, EndOfStream, Record, Rewound
from rollmill.settings import KafkaSettings
from rollmill.telemetry.clock import Clock
from rollmill.topics import ACKS, BATCHES
from rollmill.trainer.acknowledging import acknowledgement, closing_records, outgoing
from rollmill.trainer.assembly import Expectation, StepAssembler, StepRecords
from rollmill.trainer.committed import offsets_of, read_committed
from rollmill.trainer.gate import Verdict
from rollmill.trainer.policies import PolicyHistory, read_history
from rollmill.trainer.reader import BatchReader
from rollmill.trainer.state import StreamState
from rollmill.trainer.writer import TransactionalWriter


class RankSession:
    """`open` before anything else; `standing` is the position after the last acknowledged step from then on."""

    def __init__(self, settings: KafkaSettings, expectation: Expectation, prefetch_steps: int, clock: Clock) -> None:
        self._settings = settings
        self._expectation = expectation
        self._prefetch_steps = prefetch_steps
        self._clock = clock
        self._clients = KafkaClients(settings)
        self._partition = TopicPartition(BATCHES.full_name(settings.prefix), expectation.rank)
        name = f"{settings.prefix}trainer.{expectation.rank}"
        self._writer = TransactionalWriter(self._clients, name, settings.transaction_timeout_ms)
        self._reader: BatchReader | None = None
        self._head: asyncio.Task[StepRecords] | None = None
        self._stop = asyncio.Event()
        self._state: StreamState | None = None
        self._committed: StreamState | None = None

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    async def open(self, wanted: StreamState | None = None) -> None:
        """Take the rank over and read from ``wanted``, else from the committed position, else from the beginning.

        Raises FatalError where the broker cannot be reached, ConfigurationError where the committed position belongs
        to another run or world size.
        """
        try:
            if self._state is None:
                await self._take_over()
            if wanted is not None:
                await self._move(wanted)
            await self._read_from(self.standing)
        except KafkaError as error:
            where = self._settings.bootstrap_servers
            raise FatalError(f"the stream cannot be opened at {where}: {type(error).__name__}: {error}") from error

    async def peek(self, timeout_seconds: float | None) -> StepRecords | None:
        """The next step, the same until `take`; None once stopped. Raises TimeoutError, or why reading failed."""
        if self._head is None:
            self._head = asyncio.create_task(self._reading.next_step())
        stopped = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait(
            (self._head, stopped), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        if self._stop.is_set():
            return None
        if self._head not in done:
            raise TimeoutError
        return self._head.result()

    def take(self) -> None:
        """The step last peeked at is in the trainer's hands."""
        self._head = None

    def stop(self) -> None:
        self._stop.set()

    async def acknowledge(self, records: StepRecords, verdict: Verdict) -> None:
        """Outcomes, acknowledgement and position, in one transaction."""
        header, state = records.header, self.standing
        if header.step != state.next_step:
            raise FatalError(f"step {header.step} cannot be acknowledged, step {state.next_step} is next")
        after = state.replace(
            epoch=verdict.version.epoch,
            next_step=header.step + 1,
            offsets={str(self._partition.partition): records.next_offset},
        )
        closing = closing_records(header, verdict, self._clock.now(), self._settings)
        await self._commit(closing, after)

    async def end_of_stream(self) -> None:
        await self._writer.write([self._event(EndOfStream(run=self._settings.run, at=self._clock.now()))])

    async def history(self) -> PolicyHistory:
        deadline = self._writer.deadline_seconds
        return await read_history(self._clients, self._settings, self._expectation.policy, deadline)

    async def close(self) -> None:
        self._stop.set()
        await self._stop_reading()
        await self._writer.close()

    @property
    def reading(self) -> str:
        """Where the reader stands, for a person."""
        reader = self._reading
        return f"{self._partition.topic}/{self._partition.partition}, position {reader.position}, last seen: " + (
            reader.last_seen
        )

    @property
    def _reading(self) -> BatchReader:
        if self._reader is None:
            raise FatalError("the stream is closed")
        return self._reader

    @property
    def standing(self) -> StreamState:
        if self._state is None:
            raise FatalError("the stream was never opened")
        return self._state

    async def _take_over(self) -> None:
        """Fence the former owner first: what it left open is decided before the committed position is read."""
        await self._writer.start()
        self._committed = await read_committed(self._clients, self._writer.transactional_id, self._partition)
        self._state = self._committed or self._untouched()

    def _untouched(self) -> StreamState:
        """Nothing acknowledged yet: step 0 is awaited, and it is the first in the log or was deleted."""
        return StreamState(
            run=self._settings.run,
            next_step=0,
            offsets={str(self._partition.partition): 0},
            world_size=self._expectation.world_size,
        )

    async def _move(self, wanted: StreamState) -> None:
        """Make the log agree with a checkpoint: steps above it are taken back, steps below it are acknowledged."""
        known = self._committed
        if known is None or wanted.next_step < known.next_step:
            await self._commit([self._event(self._rewound(wanted))] if wanted.next_step or known else [], wanted)
        elif wanted.next_step > known.next_step:
            passed = await self._headers(known, wanted.next_step - known.next_step)
            await self._commit([self._event(acknowledgement(each, self._clock.now())) for each in passed], wanted)
        self._state = wanted

    async def _headers(self, known: StreamState, count: int) -> list[BatchHeader]:
        """Of the next steps: another lineage has trained them, and this one went back before them meanwhile."""
        reader = await self._reader_from(known)
        try:
            async with asyncio.timeout(self._writer.deadline_seconds):
                return [(await reader.next_step()).header for _ in range(count)]
        except TimeoutError:
            raise FatalError(f"the state is {count} steps ahead of the log of run {known.run!r}") from None
        finally:
            await reader.close()

    async def _commit(self, records: Sequence[Outgoing], state: StreamState) -> None:
        await self._writer.write(records, offsets_of(state, self._partition))
        self._state = self._committed = state

    def _rewound(self, wanted: StreamState) -> Rewound:
        rank = self._expectation.rank
        return Rewound(run=wanted.run, next_step=wanted.next_step, rank=rank, at=self._clock.now())

    def _event(self, event: Record) -> Outgoing:
        return outgoing(ACKS, str(self._expectation.rank), event, self._settings)

    async def _read_from(self, state: StreamState) -> None:
        await self._stop_reading()
        self._reader = await self._reader_from(state)

    async def _reader_from(self, state: StreamState) -> BatchReader:
        expected = self._expectation
        offset = state.check(run=expected.run, world_size=expected.world_size, partition=expected.rank)
        assembler = StepAssembler(expected, state.next_step)
        reader = BatchReader(self._clients, self._partition, assembler, self._prefetch_steps)
        await reader.start(offset)
        return reader

    async def _stop_reading(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
