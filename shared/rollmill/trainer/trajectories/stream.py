"""`TrajectoryStream`: for trainers that read ``trajectories`` themselves (rule A9), synchronous outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import Disposition, Purpose, TokenDisposition, Trace, Trajectory, outcome
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.settings import KafkaSettings
from rollmill.topics import TRAJECTORIES
from rollmill.trainer.acknowledgement import STAGE
from rollmill.trainer.batches.stream import NoBatch
from rollmill.trainer.consumer_mode import refuse_other_hand_over
from rollmill.trainer.event_loop_thread import EventLoopThread
from rollmill.trainer.trajectories.consumer import At, Read, TrajectoryConsumer
from rollmill.trainer.trajectories.offset_watermark import OffsetWatermark, TooManyGapsError
from rollmill.trainer.transactional_writer import TransactionalWriter


@dataclass(frozen=True, eq=False)
class Rollout:
    """A trajectory in the trainer's hands. Finish it by `TrajectoryStream.ack` or `exclude`."""

    trajectory: Trajectory
    read: Read
    """Where it lies in the log."""


@dataclass(frozen=True)
class Closing:
    """Records that are done, and the words on them."""

    records: Sequence[At] = ()
    outcomes: Sequence[TokenDisposition] = ()

    @classmethod
    def of(cls, parts: Sequence[Self]) -> Self:
        """All of them at once."""
        return cls(
            [record for part in parts for record in part.records], [word for part in parts for word in part.outcomes]
        )


class TrajectoryStream:
    """Trajectories of a run without a batcher: the trainer groups, normalises and packs them itself.

    ``record=True`` is the run's one consumer of record. Each graded training rollout of the policy is handed over once,
    at its first revision; what cannot train (eval, collect, ungraded, another policy) is excluded with its reason and
    never handed over. `ack` and `exclude` write outcomes and position in one transaction, in any order. Starting a
    second consumer of a rank fences the first, be it a `BatchStream`. The setting `hand_over` has to say
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
        self._settings = settings or KafkaSettings()
        count = TRAJECTORIES.partitions(self._settings)
        if not 0 <= rank < world_size <= count:
            raise ConfigurationError(f"rank {rank} of {world_size}: at most {count} ranks, counted from 0, can read")
        if record:
            refuse_other_hand_over(self._settings, "trajectories", "TrajectoryStream")
        self._policy, self._record, self._timeout = policy, record, timeout
        self._clock = clock or SystemClock()
        name = f"{self._settings.prefix}trainer.{rank}"
        timeout_ms = self._settings.transaction_timeout_ms
        writer = TransactionalWriter(KafkaClients(self._settings), name, timeout_ms) if record else None
        self._session = TrajectoryConsumer(self._settings, range(rank, count, world_size), writer)
        self._loop = EventLoopThread(f"rollmill-trajectories-{rank}")
        self._handed: dict[int, Rollout] = {}
        self._passed: list[Closing] = []
        """What cannot train and came while a rollout was in hand: finished with the next word on one."""

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
            if self._is_handed_over(read):
                rollout = Rollout(read.trajectory, read)
                if self._record:
                    self._handed[id(rollout)] = rollout
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
        self._loop.soon(self._session.stop)

    def close(self) -> None:
        """End everything. What is not finished stays so. A second call does nothing."""
        if self._loop.running:
            self._loop.call(self._session.close())
        self._loop.close()

    def state_dict(self) -> dict[str, Any]:
        """What is finished by partition, plain JSON values, to be kept in the trainer's checkpoint."""
        self._open()
        places = {str(number): place.model_dump(mode="json") for number, place in self._session.places.items()}
        return {"run": self._settings.run, "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; it beats the committed position. Rollouts in hand become void.

        What was finished since the checkpoint and comes again is taken back in ``outcomes`` when it is finished again:
        the ledger counts the last word. Raises ConfigurationError for a state of another run or rank, or of something
        else.
        """
        if state.get("run") != self._settings.run:
            raise ConfigurationError(f"the state belongs to run {state.get('run')!r}, not {self._settings.run!r}")
        places = _places(state)
        if set(places) != set(self._session.places):
            raise ConfigurationError(f"the state is of partitions {sorted(places)}: another rank or number of ranks")
        self._handed.clear()
        self._passed.clear()
        self._loop.call(self._session.open(places))

    def _open(self) -> None:
        if not (self._session.is_open or self._loop.closed):
            self._loop.call(self._session.open())

    def _next(self, wait: float | None) -> Read | None:
        try:
            return self._loop.call(self._session.next(wait))
        except TimeoutError:
            raise NoBatch(
                f"no trajectory in {wait:g} s; {len(self._handed)} are handed over and not finished"
            ) from None

    def _is_handed_over(self, read: Read) -> bool:
        """What the consumer of record does not hand over is finished here."""
        if not self._record:
            return True
        trajectory = read.trajectory
        if trajectory.revision:
            self._pass(Closing([read.at]))
            return False
        reason = self._cannot_train(trajectory)
        if reason is not None:
            self._pass(Closing([read.at], [*self._reopened([read]), *self._excluded(trajectory, reason)]))
        return reason is None

    def _pass(self, closing: Closing) -> None:
        """A commit has room for few finished offsets above an open one, so these wait while there is one."""
        self._passed.append(closing)
        if not self._handed:
            self._close_with_passed(Closing())

    def _cannot_train(self, trajectory: Trajectory) -> str | None:
        if trajectory.spec.policy != self._policy:
            return "other_policy"
        if trajectory.spec.purpose is not Purpose.TRAIN:
            return trajectory.spec.purpose.value
        return None if trajectory.graded else f"ungraded:{trajectory.ungraded_reason or 'unknown'}"

    def _reopened(self, reads: Iterable[Read]) -> Iterator[TokenDisposition]:
        """Takes back what a lineage that was given up may have said of records that came again (rule L3)."""
        for read in reads:
            if self._session.may_be_finished(read):
                for trace in read.trajectory.traces:
                    yield from self._outcomes(read.trajectory, trace, Disposition.REOPENED, None)

    def _close_with_passed(self, closing: Closing) -> None:
        try:
            self._close(Closing.of([closing, *self._passed]))
        except TooManyGapsError:
            if not closing.records:
                raise
            self._close(closing)  # the others wait on
        else:
            self._passed.clear()

    def _close(self, closing: Closing) -> None:
        self._loop.call(self._session.finish(closing.records, closing.outcomes))

    def _finish(self, rollouts: Sequence[Rollout], outcomes: Sequence[TokenDisposition]) -> None:
        if not self._record:
            raise InvalidInputError("this stream reads along (record=False) and writes nothing")
        unknown = [each for each in rollouts if id(each) not in self._handed]
        if unknown:
            session = unknown[0].trajectory.session_id
            raise InvalidInputError(f"session {session} is not open: it is finished, or the stream was moved since")
        reads = [each.read for each in rollouts]
        self._close_with_passed(Closing([read.at for read in reads], [*self._reopened(reads), *outcomes]))
        for each in rollouts:
            self._handed.pop(id(each), None)

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


def _places(state: dict[str, Any]) -> dict[int, OffsetWatermark]:
    try:
        return {int(number): OffsetWatermark.model_validate(place) for number, place in state["places"].items()}
    except (KeyError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"this is no state of a trajectory stream: {error}") from error
