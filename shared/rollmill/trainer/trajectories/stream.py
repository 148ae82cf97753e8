"""`TrajectoryStream`: for trainers that read ``trajectories`` themselves (rule A9), for synchronous callers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import Disposition, Purpose, TokenDisposition, Trace, Trajectory, outcome
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.connection_diagnostics import await_broker
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.settings import KafkaSettings, load
from rollmill.topics import TRAJECTORIES
from rollmill.trainer.batches.stream import NoBatch
from rollmill.trainer.consumer_mode import require_consumer_mode
from rollmill.trainer.event_loop_thread import EventLoopThread
from rollmill.trainer.producer_records import STAGE
from rollmill.trainer.trajectories.consumer import ReceivedTrajectory, RecordPosition, TrajectoryConsumer
from rollmill.trainer.trajectories.offset_watermark import OffsetWatermark, TooManyGapsError
from rollmill.trainer.transactional_writer import TransactionalWriter


@dataclass(frozen=True, eq=False)
class Rollout:
    """A trajectory handed to the trainer. Finish it with `TrajectoryStream.ack` or `exclude`."""

    trajectory: Trajectory
    read: ReceivedTrajectory
    """The record, with its position in the log."""


@dataclass(frozen=True)
class FinishedRecords:
    """Records that are finished, and their outcomes."""

    records: Sequence[RecordPosition] = ()
    outcomes: Sequence[TokenDisposition] = ()

    @classmethod
    def of(cls, parts: Sequence[Self]) -> Self:
        """All of them at once."""
        return cls(
            [record for part in parts for record in part.records], [item for part in parts for item in part.outcomes]
        )


class TrajectoryStream:
    """Trajectories of a run without a batcher: the trainer groups, normalises and packs them itself.

    ``record=True`` is the run's one consumer of record. Each graded training rollout of the policy is handed over once,
    at its first revision; what cannot train (eval, collect, ungraded, another policy) is excluded with its reason and
    never handed over. `ack` and `exclude` write outcomes and position in one transaction, in any order. Starting a
    second consumer of a rank fences the first, also a `BatchStream`. The setting `hand_over` has to be
    ``trajectories``; where a batcher has run all the same, opening is refused, and no batcher starts once this is open.

    ``record=False`` reads along: every record, every revision, and nothing is ever written.

    Rank ``rank`` of ``world_size`` reads the partitions p with p mod world_size = rank. ``timeout``: seconds without a
    trajectory after which `trajectories` raises NoBatch; None waits for ever.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        settings: KafkaSettings | None = None,
        policy: str = "policy",
        record: bool = True,
        timeout: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings or load(KafkaSettings)
        count = TRAJECTORIES.partitions(self._settings)
        if not 0 <= rank < world_size <= count:
            raise ConfigurationError(f"rank {rank} of {world_size}: at most {count} ranks, counted from 0, can read")
        if record:
            require_consumer_mode(self._settings, "trajectories", "TrajectoryStream")
        self._policy, self._record, self._timeout = policy, record, timeout
        self._clock = clock or SystemClock()
        name = f"{self._settings.prefix}trainer.{rank}"
        timeout_ms = self._settings.transaction_timeout_ms
        writer = TransactionalWriter(KafkaClients(self._settings), name, timeout_ms) if record else None
        self._consumer = TrajectoryConsumer(self._settings, range(rank, count, world_size), writer)
        self._loop = EventLoopThread(f"rollmill-trajectories-{rank}")
        self._open_rollouts: dict[int, Rollout] = {}
        self._deferred: list[FinishedRecords] = []
        """What cannot train and came while rollouts were open: committed when one of them is finished."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def trajectories(
        self, *, until: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> Iterator[Rollout]:
        """Rollouts in the order of each partition, until `stop`, `close`, or ``until()`` before one is waited for.

        What is not finished comes again after a restart.
        """
        self._open()
        wait = self._timeout if timeout is None else timeout
        while not (self._loop.closed or (until is not None and until())):
            read = self._next(wait)
            if read is None:
                return
            if self._accept(read):
                rollout = Rollout(read.trajectory, read)
                if self._record:
                    self._open_rollouts[id(rollout)] = rollout
                yield rollout

    def ack(self, rollouts: Sequence[Rollout]) -> None:
        """They were trained: outcomes of their graded traces, ungraded ones are excluded, and the position.

        Raises InvalidInputError for a rollout that is not open or in a stream that only reads, FencedError where
        another process has taken this rank, FatalError where the commit failed.
        """
        self._finish(rollouts, [item for each in rollouts for item in self._trained(each.trajectory)])

    def exclude(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """They will not be trained. Raises what `ack` raises."""
        self._finish(rollouts, [item for each in rollouts for item in self._excluded(each.trajectory, reason)])

    def stop(self) -> None:
        """End `trajectories`, also while it waits. May be called from any thread."""
        self._loop.soon(self._consumer.stop)

    def close(self) -> None:
        """Stop and close everything. Open rollouts stay unfinished. A second call does nothing."""
        if self._loop.running:
            self._loop.call(self._consumer.close())
        self._loop.close()

    def state_dict(self) -> dict[str, Any]:
        """What is finished by partition, plain JSON values, to be kept in the trainer's checkpoint."""
        self._open()
        watermarks = {
            str(number): watermark.model_dump(mode="json") for number, watermark in self._consumer.watermarks.items()
        }
        return {"run": self._settings.run, "places": watermarks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; it wins over the committed position. Open rollouts become void.

        What was finished since the checkpoint and comes again is reopened in ``outcomes`` when it is finished again:
        the ledger counts the last outcome. Raises ConfigurationError for a state of another run or rank, or of
        something else.
        """
        if state.get("run") != self._settings.run:
            raise ConfigurationError(f"the state belongs to run {state.get('run')!r}, not {self._settings.run!r}")
        watermarks = _watermarks(state)
        if set(watermarks) != set(self._consumer.watermarks):
            raise ConfigurationError(
                f"the state is of partitions {sorted(watermarks)}: another rank or number of ranks"
            )
        self._open_rollouts.clear()
        self._deferred.clear()
        self._loop.call(self._open_at(watermarks))

    def _open(self) -> None:
        if not (self._consumer.is_open or self._loop.closed):
            self._loop.call(self._open_at())

    async def _open_at(self, watermarks: dict[int, OffsetWatermark] | None = None) -> None:
        await await_broker(self._settings)
        await self._consumer.open(watermarks)

    def _next(self, wait: float | None) -> ReceivedTrajectory | None:
        try:
            return self._loop.call(self._consumer.next(wait))
        except TimeoutError:
            raise NoBatch(
                f"no trajectory in {wait:g} s; {len(self._open_rollouts)} are handed over and not finished"
            ) from None

    def _accept(self, read: ReceivedTrajectory) -> bool:
        """Whether to hand it over; what the consumer of record does not hand over is finished here."""
        if not self._record:
            return True
        trajectory = read.trajectory
        if trajectory.revision:
            self._defer(FinishedRecords([read.at]))
            return False
        reason = self._cannot_train(trajectory)
        if reason is not None:
            self._defer(FinishedRecords([read.at], [*self._reopened([read]), *self._excluded(trajectory, reason)]))
        return reason is None

    def _defer(self, finished: FinishedRecords) -> None:
        """A commit has room for few finished offsets above an open one, so these wait while a rollout is open."""
        self._deferred.append(finished)
        if not self._open_rollouts:
            self._commit_with_deferred(FinishedRecords())

    def _cannot_train(self, trajectory: Trajectory) -> str | None:
        if trajectory.spec.policy != self._policy:
            return "other_policy"
        if trajectory.spec.purpose is not Purpose.TRAIN:
            return trajectory.spec.purpose.value
        return None if trajectory.graded else f"ungraded:{trajectory.ungraded_reason or 'unknown'}"

    def _reopened(self, reads: Iterable[ReceivedTrajectory]) -> Iterator[TokenDisposition]:
        """Takes back outcomes that an abandoned lineage may have written for records that came again (rule L3)."""
        for read in reads:
            if self._consumer.may_be_finished(read):
                for trace in read.trajectory.traces:
                    yield from self._outcomes(read.trajectory, trace, Disposition.REOPENED, None)

    def _commit_with_deferred(self, finished: FinishedRecords) -> None:
        try:
            self._commit(FinishedRecords.of([finished, *self._deferred]))
        except TooManyGapsError:
            if not finished.records:
                raise
            self._commit(finished)  # the deferred ones wait
        else:
            self._deferred.clear()

    def _commit(self, finished: FinishedRecords) -> None:
        self._loop.call(self._consumer.finish(finished.records, finished.outcomes))

    def _finish(self, rollouts: Sequence[Rollout], outcomes: Sequence[TokenDisposition]) -> None:
        if not self._record:
            raise InvalidInputError("this stream only reads (record=False) and writes nothing")
        unknown = [each for each in rollouts if id(each) not in self._open_rollouts]
        if unknown:
            session = unknown[0].trajectory.session_id
            raise InvalidInputError(f"session {session} is not open: it is finished, or a checkpoint was loaded since")
        reads = [each.read for each in rollouts]
        self._commit_with_deferred(FinishedRecords([read.at for read in reads], [*self._reopened(reads), *outcomes]))
        for each in rollouts:
            self._open_rollouts.pop(id(each), None)

    def _trained(self, trajectory: Trajectory) -> Iterator[TokenDisposition]:
        for trace in trajectory.traces:
            if trace.reward is None:
                yield from self._outcomes(trajectory, trace, Disposition.EXCLUDED, "trace_not_graded")
            else:
                yield from self._outcomes(trajectory, trace, Disposition.TRAINED, None)

    def _excluded(self, trajectory: Trajectory, reason: str) -> Iterator[TokenDisposition]:
        for trace in trajectory.traces:
            yield from self._outcomes(trajectory, trace, Disposition.EXCLUDED, reason)

    def _outcomes(
        self, trajectory: Trajectory, trace: Trace, disposition: Disposition, reason: str | None
    ) -> Iterator[TokenDisposition]:
        units = trace.units()
        if units:
            yield outcome(
                disposition,
                stage=STAGE,
                session_id=trajectory.session_id,
                attempt=trajectory.attempt,
                units=units,
                reason=reason,
                at=self._clock.now(),
            )


def _watermarks(state: dict[str, Any]) -> dict[int, OffsetWatermark]:
    try:
        return {int(number): _watermark(value) for number, value in state["places"].items()}
    except (KeyError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"this is no state of a trajectory stream: {error}") from error


def _watermark(value: dict[str, Any]) -> OffsetWatermark:
    """A newer release's may have more fields; one without the position is of something else."""
    if value and "next_offset" not in value:
        raise ValueError(f"next_offset is missing: {value}")
    return OffsetWatermark.model_validate(value)
