"""`BatchStream`: the steps of one data-parallel rank, for synchronous callers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rollmill.errors import ConfigurationError, InvalidInputError, RetryableError
from rollmill.models import BatchHeader, PolicyVersion
from rollmill.runtime.kafka.connection_diagnostics import await_broker
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.settings import KafkaSettings, load
from rollmill.trainer.batches.rank_assignment import RankAssignment
from rollmill.trainer.batches.rank_consumer import RankConsumer
from rollmill.trainer.batches.staleness_filter import FilterResult, StaleAction, filter_step, unknown_epochs
from rollmill.trainer.batches.state import StreamState
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.consumer_mode import require_consumer_mode
from rollmill.trainer.event_loop_thread import EventLoopThread


class NoBatch(RetryableError):  # noqa: N818  # a short name for what a training loop catches
    """No step came in time; the message names the expected step. Calling `BatchStream.steps` again waits again."""


@dataclass(frozen=True)
class _OpenStep:
    """A step that is not acknowledged yet; ``step`` is None where all of it was too stale to train."""

    records: StepRecords
    result: FilterResult
    step: Step | None


class BatchStream:
    """The steps of rank ``rank`` of ``world_size``, each exactly once on the lineage of the loaded checkpoint.

    Steps that were cut for more ranks are read where ``world_size`` divides their number: a rank then has the
    micro-batches of several. Otherwise they are refused (ConfigurationError).

    >>> for step in stream.steps(lambda: version):
    ...     for mb in step:
    ...         loss = (surrogate(mb) * mb.loss_weight).sum() / step.denominator
    ...     publisher.update(version)
    ...     step.ack()

    A background thread with an event loop reads ahead ``prefetch_steps`` whole steps and commits. One process per
    rank: starting a second one fences the first (FencedError there). Steps that were not acknowledged come again after
    a restart, bit-identical. Not for use from several threads at once, apart from `stop`.

    ``policy``: refuse batches of any other. ``expect``: the fingerprint, or several, of tokenizer, chat template and
    model; a step with a trace of another one, or of none, is refused (ConfigurationError). ``stale``: what the filter
    at hand-over does. ``timeout``: seconds without a step after which `steps` raises NoBatch; None waits for ever.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        settings: KafkaSettings | None = None,
        policy: str = "policy",
        expect: str | Collection[str] | None = None,
        stale: StaleAction | str = StaleAction.MASK,
        prefetch_steps: int = 2,
        timeout: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        settings = settings or load(KafkaSettings)
        if not 0 <= rank < world_size <= settings.batch_partitions:
            raise ConfigurationError(
                f"rank {rank} of {world_size}: ranks count from 0, and at most {settings.batch_partitions} "
                "(batch_partitions) of them can read"
            )
        require_consumer_mode(settings, "batches", "BatchStream")
        self._rank, self._run, self._settings = rank, settings.run, settings
        assignment = RankAssignment(rank, world_size, world_size)
        wanted = None if expect is None else frozenset((expect,) if isinstance(expect, str) else expect)
        self._consumer = RankConsumer(settings, policy, assignment, prefetch_steps, clock or SystemClock(), wanted)
        self._loop = EventLoopThread(f"rollmill-batches-{rank}")
        self._stale = StaleAction(stale)
        self._timeout = timeout
        self._open_steps: deque[_OpenStep] = deque()
        self._forks: dict[int, int] = {}
        self._counts: Counter[str] = Counter()
        self._newest = PolicyVersion()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(
        self,
        version: Callable[[], tuple[int, int]],
        *,
        until: Callable[[], bool] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Step]:
        """Steps in order, until `stop`, `close`, or ``until()`` is true before one is waited for.

        ``version`` is called at each hand-over and returns the (epoch, version) of the weights that will be trained;
        traces that are too stale for it are cleared, on every rank alike. A step of which nothing is left is
        acknowledged as excluded and never handed out. Raises NoBatch after ``timeout`` seconds without a step (None:
        the stream's own), FatalError where a step is missing in the log, InvalidInputError where ``version()`` is no
        pair.
        """
        self._open()
        wait = self._timeout if timeout is None else timeout
        while not (self._loop.closed or (until is not None and until())):
            records = self._await_step(wait)
            if records is None:
                return
            step = self._hand_over(records, _parse_version(version()))
            if step is not None:
                yield step

    def stop(self) -> None:
        """End `steps`, also while it waits. May be called from any thread."""
        self._loop.soon(self._consumer.stop)

    def close(self) -> None:
        """Stop and close everything. Open steps stay unacknowledged. A second call does nothing."""
        if self._loop.running:
            self._loop.call(self._consumer.close())
        self._loop.close()

    def end_of_stream(self) -> None:
        """Announce that no more trajectories will come, so that the batcher cuts the steps that it can."""
        self._open()
        self._loop.call(self._consumer.end_of_stream())

    def state_dict(self) -> dict[str, Any]:
        """Position after the last acknowledged step, plain JSON values, to be kept in the trainer's checkpoint."""
        return self._open().dump()

    def load_state_dict(self, state: dict[str, Any], *others: dict[str, Any]) -> None:
        """Continue from a checkpoint; it wins over the committed position. A difference is recorded as `Rewound`.

        Where the checkpoint was written by another number of ranks, pass the states of all of them. Raises
        ConfigurationError for states of another run, or that do not cover this rank. Open steps become void.
        """
        wanted = StreamState.of_ranks([StreamState.read(each) for each in (state, *others)])
        self._open_steps.clear()
        self._loop.call(self._open_at(wanted))

    @property
    def counts(self) -> dict[str, int]:
        """Of this process: steps handed over, acknowledged, skipped; own traces and tokens cleared as stale."""
        return dict(self._counts)

    def _open(self) -> StreamState:
        if not (self._consumer.is_open or self._loop.closed):
            self._loop.call(self._open_at())
        return self._consumer.position

    async def _open_at(self, wanted: StreamState | None = None) -> None:
        await await_broker(self._settings)
        await self._consumer.open(wanted)

    def _await_step(self, wait: float | None) -> StepRecords | None:
        try:
            return self._loop.call(self._consumer.peek(wait))
        except TimeoutError:
            raise NoBatch(self._awaited(wait)) from None

    def _awaited(self, wait: float | None) -> str:
        open_steps = [item.records.header.step for item in self._open_steps]
        next_step = self._open().next_step
        return (
            f"no step in {wait:g} s: rank {self._rank} of run {self._run!r} expects step "
            f"{open_steps[-1] + 1 if open_steps else next_step} ({self._consumer.reading}); "
            f"newest version {self._newest}; "
            f"steps not acknowledged: {', '.join(map(str, open_steps)) or 'none'}"
        )

    def _hand_over(self, records: StepRecords, version: PolicyVersion) -> Step | None:
        result = filter_step(records.header, version, self._forks_for(records.header, version), self._stale)
        step = None if result.empty else Step(records, result, self._acknowledge)
        self._consumer.take()
        self._newest = version
        self._count(records.header, result)
        self._open_steps.append(_OpenStep(records, result, step))
        self._acknowledge_skipped()
        return step

    def _forks_for(self, header: BatchHeader, version: PolicyVersion) -> dict[int, int]:
        if unknown_epochs(header, version, {**self._forks, **header.forks}):
            self._forks = self._loop.call(self._consumer.history()).forks
        forks = {**self._forks, **header.forks}
        if unknown := unknown_epochs(header, version, forks):
            raise InvalidInputError(
                f"version {version} is given, but the start of epoch {unknown[0]} is not announced: "
                "call PolicyPublisher.resume first"
            )
        return forks

    def _count(self, header: BatchHeader, result: FilterResult) -> None:
        self._counts["steps_skipped" if result.empty else "steps_handed_over"] += 1
        for row, kept in zip(header.table, result.kept, strict=True):
            if row.rank in self._consumer.assignment.partitions and not kept:
                self._counts["traces_stale"] += 1
                self._counts["tokens_stale"] += row.mask_sum

    def _acknowledge(self, step: Step) -> None:
        first = self._open_steps[0].step if self._open_steps else None
        if first is not step:
            raise InvalidInputError(self._why_not(step, first))
        self._acknowledge_first()
        self._acknowledge_skipped()

    def _why_not(self, step: Step, first: Step | None) -> str:
        if first is None or all(item.step is not step for item in self._open_steps):
            return f"step {step.number} is not open: it was acknowledged before, or the stream was moved since"
        return f"step {step.number} cannot be acknowledged before step {first.number}"

    def _acknowledge_skipped(self) -> None:
        """Acknowledge steps with nothing left to train, as soon as no step before them is open."""
        while self._open_steps and self._open_steps[0].step is None:
            self._acknowledge_first()

    def _acknowledge_first(self) -> None:
        first = self._open_steps[0]
        self._loop.call(self._consumer.acknowledge(first.records, first.result))
        self._open_steps.popleft()
        self._counts["steps_acknowledged"] += 1


def _parse_version(version: object) -> PolicyVersion:
    """A number alone names no epoch, so a pair is required."""
    if isinstance(version, tuple | list) and len(version) == 2:  # noqa: PLR2004  # epoch and version
        return PolicyVersion(*version)
    raise InvalidInputError(
        f"the version to be trained is (epoch, version), not {version!r}: pass `PolicyPublisher.version`, or what "
        "`update`, `announce` and `resume` return"
    )
