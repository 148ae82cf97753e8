"""One rank's consumer: position, steps read ahead, acknowledgements. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka.errors import KafkaError

from rollmill.errors import ConfigurationError, FatalError
from rollmill.models import EndOfStream, Record, Rewound, StepsResharded
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.connection_diagnostics import diagnose_refusal
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.telemetry.clock import Clock
from rollmill.settings import KafkaSettings
from rollmill.topics import ACKS, BATCHES
from rollmill.trainer.batches.acknowledgement import acknowledgement, closing_records
from rollmill.trainer.batches.rank_agreement import agreed_state
from rollmill.trainer.batches.rank_assignment import OtherWorldSizeError, RankAssignment, return_command
from rollmill.trainer.batches.reader import MultiPartitionReader
from rollmill.trainer.batches.resharding import read_placement
from rollmill.trainer.batches.staleness_filter import FilterResult
from rollmill.trainer.batches.state import StreamState, offsets_of, rank_group, read_committed
from rollmill.trainer.batches.step_assembly import Expectation, StepRecords
from rollmill.trainer.policy.history import PolicyHistory, read_history
from rollmill.trainer.producer_records import to_producer_record
from rollmill.trainer.transactional_writer import TransactionalWriter


class RankConsumer:
    """`open` before anything else; `position` is the position after the last acknowledged step from then on."""

    def __init__(
        self,
        settings: KafkaSettings,
        policy: str,
        assignment: RankAssignment,
        prefetch_steps: int,
        clock: Clock,
        expect: frozenset[str] | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self.assignment = assignment
        """Assumes steps cut for its own number of ranks, until a state or the log shows another one."""
        self._prefetch_steps = prefetch_steps
        self._clock = clock
        self._expect = expect
        self._clients = KafkaClients(settings)
        self._topic = BATCHES.full_name(settings.prefix)
        name = rank_group(settings, assignment.rank)
        self._failpoints = Failpoints.parse(settings.failpoints)
        self._writer = TransactionalWriter(self._clients, name, settings.transaction_timeout_ms, self._failpoints)
        self._reader: MultiPartitionReader | None = None
        self._head: asyncio.Task[StepRecords] | None = None
        self._stop = asyncio.Event()
        self._state: StreamState | None = None
        self._committed: StreamState | None = None
        self._layout: StepsResharded | None = None

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    async def open(self, wanted: StreamState | None = None) -> None:
        """Take over the rank and read from ``wanted``, else from the committed position, else from the beginning.

        The committed position is that of the rank furthest behind: what other ranks have not acknowledged comes again.

        Raises FatalError where the broker cannot be reached, ConfigurationError where the committed position belongs
        to another run or world size, or where the log does not hold the steps that another rank needs.
        """
        try:
            is_new = self._state is None
            if is_new:
                await self._take_over()
            if wanted is not None:
                await self._move(wanted)
            elif is_new:
                await self._agree()
            await self._read_from(self.position)
        except KafkaError as error:
            await diagnose_refusal(self._settings)
            where = self._settings.bootstrap_servers
            raise FatalError(f"the stream cannot be opened at {where}: {type(error).__name__}: {error}") from error

    async def peek(self, timeout_seconds: float | None) -> StepRecords | None:
        """The next step, the same until `take`; None once stopped. Raises TimeoutError, or why reading failed."""
        if self._head is None:
            self._head = asyncio.create_task(self._next_step())
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
        """The step last returned by `peek` was handed to the trainer."""
        self._head = None

    def stop(self) -> None:
        self._stop.set()

    async def acknowledge(self, records: StepRecords, result: FilterResult) -> None:
        """Outcomes, acknowledgement and position, in one transaction."""
        header, state = records.header, self.position
        if header.step != state.next_step:
            raise FatalError(f"step {header.step} cannot be acknowledged, step {state.next_step} is next")
        offsets = {str(number): offset for number, offset in records.offsets.items()}
        after = state.replace(epoch=result.version.epoch, next_step=header.step + 1, offsets=offsets)
        now = self._clock.now()
        closing = [closing_records(each, result, now, self._settings) for each in records.headers]
        self._failpoints.reach(Failpoint.TRAINER_BEFORE_ACK)
        await self._commit([record for records_of_one in closing for record in records_of_one], after)
        self._failpoints.reach(Failpoint.TRAINER_AFTER_ACK)

    async def end_of_stream(self) -> None:
        await self._writer.write([self._event(EndOfStream(run=self._settings.run, at=self._clock.now()))])

    async def history(self) -> PolicyHistory:
        deadline = self._writer.deadline_seconds
        return await read_history(self._clients, self._settings, self._policy, deadline)

    async def close(self) -> None:
        self._stop.set()
        await self._stop_reading()
        await self._writer.close()

    @property
    def reading(self) -> str:
        """The reader's position, as text for a message."""
        return str(self._reading)

    @property
    def _reading(self) -> MultiPartitionReader:
        if self._reader is None:
            raise FatalError("the stream is closed")
        return self._reader

    @property
    def position(self) -> StreamState:
        if self._state is None:
            raise FatalError("the stream was never opened")
        return self._state

    async def _take_over(self) -> None:
        """Fence the former owner first: its open transaction ends before the committed position is read."""
        await self._writer.start()
        layout = await read_placement(self._clients, self._settings)
        committed = await read_committed(self._clients, self._writer.transactional_id, self._topic)
        state = committed or self._untouched()
        if layout is not None and state.placement < layout.placement:
            state, committed = self._layout_start(layout, state.epoch), None
        self._layout, self._committed, self._state = layout, committed, state

    async def _agree(self) -> None:
        own = self.position
        assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, own.world_size)
        own.check(run=self._settings.run, assignment=assignment)
        wanted = await agreed_state(self._clients, self._topic, assignment, own, self._layout)
        if wanted is not None:
            self.assignment = assignment
            await self._commit(self._rewound(wanted), wanted)

    def _layout_start(self, layout: StepsResharded, epoch: int, next_step: int | None = None) -> StreamState:
        """Where the records of the newest layout begin. ``next_step``: of a checkpoint, for the error message.

        Raises OtherWorldSizeError where its world size is no multiple of this trainer's ranks.
        """
        assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, layout.world_size, next_step)
        return StreamState(
            run=self._settings.run,
            epoch=epoch,
            next_step=layout.next_step,
            offsets={str(number): layout.offsets.get(str(number), 0) for number in assignment.partitions},
            world_size=layout.world_size,
            placement=layout.placement,
        )

    def _untouched(self) -> StreamState:
        return StreamState.untouched(self._settings.run, self.assignment)

    async def _next_step(self) -> StepRecords:
        """The first step of the log shows how many ranks it is cut for; until then that is only assumed."""
        try:
            return await self._reading.next_step()
        except OtherWorldSizeError as other:
            if self.position != self._untouched():
                raise
            self.assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, other.found)
            self._state = self._untouched()
            await self._close_reader()
            self._reader = await self._reader_from(self._state)
            return await self._reading.next_step()

    async def _move(self, wanted: StreamState) -> None:
        """Make the log agree with a checkpoint: steps above it are taken back, steps below it are acknowledged."""
        if self._layout is not None and wanted.placement < self._layout.placement:
            wanted = await self._translated(wanted, self._layout)
        assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, wanted.world_size, wanted.next_step)
        wanted = wanted.narrowed(assignment)
        wanted.check(run=self._settings.run, assignment=assignment)
        self.assignment = assignment
        known = self._committed
        if known is not None and set(known.offsets) != set(wanted.offsets):
            known = None  # of another number of ranks: nothing to compare
        if known is None or wanted.next_step < known.next_step:
            await self._commit(self._rewound(wanted) if wanted.next_step or self._committed else [], wanted)
        elif wanted.next_step > known.next_step:
            passed = await self._steps(known, wanted.next_step - known.next_step)
            now = self._clock.now()
            headers = (header for step in passed for header in step.headers)
            await self._commit([self._event(acknowledgement(each, now), each.rank) for each in headers], wanted)
        self._state = wanted

    async def _translated(self, wanted: StreamState, layout: StepsResharded) -> StreamState:
        """A checkpoint of records that are void, translated to the newest layout. Raises ConfigurationError."""
        begin = self._layout_start(layout, wanted.epoch, wanted.next_step)
        ahead = wanted.next_step - begin.next_step
        if ahead < 0:
            raise ConfigurationError(
                f"the checkpoint is at step {wanted.next_step}, and steps were returned to the batcher only from step "
                f"{begin.next_step} on: {return_command(self.assignment.ranks, wanted.next_step)}"
            )
        self.assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, layout.world_size)
        self._committed = self._committed or begin
        passed = await self._steps(begin, ahead)
        here = passed[-1].offsets if passed else {int(number): offset for number, offset in begin.offsets.items()}
        offsets = {str(number): offset for number, offset in here.items()}
        return begin.replace(next_step=wanted.next_step, offsets=offsets)

    async def _steps(self, known: StreamState, count: int) -> list[StepRecords]:
        """The next ``count`` steps: another lineage trained them, and the committed position went back before them
        since.
        """
        reader = await self._reader_from(known)
        try:
            async with asyncio.timeout(self._writer.deadline_seconds):
                return [await reader.next_step() for _ in range(count)]
        except TimeoutError:
            raise FatalError(f"the state is {count} steps ahead of the log of run {known.run!r}") from None
        finally:
            await reader.close()

    async def _commit(self, records: Sequence[ProducerRecord], state: StreamState) -> None:
        await self._writer.write(records, offsets_of(state, self._topic))
        self._state = self._committed = state

    def _rewound(self, wanted: StreamState) -> list[ProducerRecord]:
        now = self._clock.now()
        return [
            self._event(Rewound(run=wanted.run, next_step=wanted.next_step, rank=number, at=now), number)
            for number in self.assignment.partitions
        ]

    def _event(self, event: Record, rank: int | None = None) -> ProducerRecord:
        return to_producer_record(ACKS, str(self.assignment.rank if rank is None else rank), event, self._settings)

    async def _read_from(self, state: StreamState) -> None:
        """Raises ConfigurationError where the state is of other partitions than this rank's."""
        await self._stop_reading()
        self.assignment = RankAssignment.of(self.assignment.rank, self.assignment.ranks, state.world_size)
        self._reader = await self._reader_from(state)

    async def _reader_from(self, state: StreamState) -> MultiPartitionReader:
        offsets = state.check(run=self._settings.run, assignment=self.assignment)
        expected = {
            number: Expectation(
                self._settings.run,
                self._policy,
                number,
                self.assignment.world_size,
                self.assignment.ranks,
                state.placement,
                self._expect,
            )
            for number in self.assignment.partitions
        }
        reader = MultiPartitionReader(self._clients, self._topic, expected, state.next_step, self._prefetch_steps)
        await reader.start(offsets)
        return reader

    async def _stop_reading(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)
        await self._close_reader()

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
