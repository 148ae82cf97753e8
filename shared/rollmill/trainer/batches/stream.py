"""`BatchStream`: the steps of one data-parallel rank, synchronous outside."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rollmill.errors import ConfigurationError, InvalidInputError, RetryableError
from rollmill.models import BatchHeader, PolicyVersion
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.settings import KafkaSettings
from rollmill.trainer.batches.rank_assignment import RankAssignment
from rollmill.trainer.batches.rank_consumer import RankConsumer
from rollmill.trainer.batches.staleness_filter import FilterResult, StaleAction, filter_step, unknown_epochs
from rollmill.trainer.batches.state import StreamState
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.consumer_mode import refuse_other_hand_over
from rollmill.trainer.event_loop_thread import EventLoopThread


class NoBatch(RetryableError):  # noqa: N818  # a short name for what a training loop catches
    """No step came in time; the message says what is awaited. Calling `BatchStream.steps` again waits again."""


@dataclass(frozen=True)
class _Open:
    """A step that is not acknowledged yet; ``step`` is None where nothing of it was left to train."""

    records: StepRecords
    verdict: FilterResult
    step: Step | None


class BatchStream:
    """The steps of rank ``rank`` of ``world_size``, each exactly once on the lineage of the loaded checkpoint.

    Steps that are cut for more ranks are read where ``world_size`` divides their number: a rank then has the
    micro-batches of several. Otherwise they are refused (ConfigurationError).

    >>> for step in stream.steps(lambda: version):
    ...     for mb in step:
    ...         loss = (surrogate(mb) * mb.loss_weight).sum() / step.denominator
    ...     publisher.update(version)
    ...     step.ack()

    A thread of its own with an event loop reads ahead ``prefetch_steps`` whole steps and commits. One process per
    rank: starting a second one fences the first (FencedError there). What is not acknowledged is seen again after a
    restart, bit-identical. Not for use from several threads at once, apart from `stop`.

    ``policy``: refuse batches of any other. ``expect``: the fingerprint, or several, of tokenizer, chat template and
    model; a step with a trace of another one, or of none, is refused (ConfigurationError). ``stale``: what the gate at
    hand-over does. ``timeout``: seconds without a step after which `steps` raises NoBatch; None waits for ever.
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
        settings = settings or KafkaSettings()
        if not 0 <= rank < world_size <= settings.batch_partitions:
            raise ConfigurationError(
                f"rank {rank} of {world_size}: ranks count from 0, and at most {settings.batch_partitions} "
                "(batch_partitions) of them can read"
            )
        refuse_other_hand_over(settings, "batches", "BatchStream")
        self._rank, self._run = rank, settings.run
        share = RankAssignment(rank, world_size, world_size)
        wanted = None if expect is None else frozenset((expect,) if isinstance(expect, str) else expect)
        self._session = RankConsumer(settings, policy, share, prefetch_steps, clock or SystemClock(), wanted)
        self._loop = EventLoopThread(f"rollmill-batches-{rank}")
        self._stale = StaleAction(stale)
        self._timeout = timeout
        self._open_steps: deque[_Open] = deque()
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

        ``version`` is asked at each hand-over for the (epoch, version) of the weights that will be trained; traces
        that are too stale for it are cleared, on every rank alike. A step of which nothing is left is acknowledged
        as excluded and never handed out. Raises NoBatch after ``timeout`` seconds without a step (None: the
        stream's own), FatalError where a step is missing in the log, InvalidInputError where ``version()`` is no pair.
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
        self._loop.soon(self._session.stop)

    def close(self) -> None:
        """End everything. Steps that are not acknowledged stay so. A second call does nothing."""
        if self._loop.running:
            self._loop.call(self._session.close())
        self._loop.close()

    def end_of_stream(self) -> None:
        """Tell the batcher that no more trajectories will come, so that it cuts what it has."""
        self._open()
        self._loop.call(self._session.end_of_stream())

    def state_dict(self) -> dict[str, Any]:
        """Position after the last acknowledged step, plain JSON values, to be kept in the trainer's checkpoint."""
        return self._open().dump()

    def load_state_dict(self, state: dict[str, Any], *others: dict[str, Any]) -> None:
        """Go on from a checkpoint; it beats the committed position. A difference is written down as `Rewound`.

        Where the checkpoint was written by another number of ranks, give the states of all of them. Raises
        ConfigurationError for states of another run, or that do not cover this rank. Open steps become void.
        """
        wanted = StreamState.of_ranks([StreamState.read(each) for each in (state, *others)])
        self._open_steps.clear()
        self._loop.call(self._session.open(wanted))

    @property
    def counts(self) -> dict[str, int]:
        """Of this process: steps handed over, acknowledged, skipped; own traces and tokens cleared as stale."""
        return dict(self._counts)

    def _open(self) -> StreamState:
        if not (self._session.is_open or self._loop.closed):
            self._loop.call(self._session.open())
        return self._session.standing

    def _await_step(self, wait: float | None) -> StepRecords | None:
        try:
            return self._loop.call(self._session.peek(wait))
        except TimeoutError:
            raise NoBatch(self._awaited(wait)) from None

    def _awaited(self, wait: float | None) -> str:
        held = [item.records.header.step for item in self._open_steps]
        standing = self._open().next_step
        return (
            f"no step in {wait:g} s: rank {self._rank} of run {self._run!r} awaits step "
            f"{held[-1] + 1 if held else standing} ({self._session.reading}); newest version {self._newest}; "
            f"steps not acknowledged: {', '.join(map(str, held)) or 'none'}"
        )

    def _hand_over(self, records: StepRecords, version: PolicyVersion) -> Step | None:
        verdict = filter_step(records.header, version, self._forks_for(records.header, version), self._stale)
        step = None if verdict.empty else Step(records, verdict, self._acknowledge)
        self._session.take()
        self._newest = version
        self._count(records.header, verdict)
        self._open_steps.append(_Open(records, verdict, step))
        self._close_skipped()
        return step

    def _forks_for(self, header: BatchHeader, version: PolicyVersion) -> dict[int, int]:
        if unknown_epochs(header, version, {**self._forks, **header.forks}):
            self._forks = self._loop.call(self._session.history()).forks
        forks = {**self._forks, **header.forks}
        if unknown := unknown_epochs(header, version, forks):
            raise InvalidInputError(
                f"version {version} is handed in, but the beginning of epoch {unknown[0]} is not announced: "
                "call PolicyPublisher.resume first"
            )
        return forks

    def _count(self, header: BatchHeader, verdict: FilterResult) -> None:
        self._counts["steps_skipped" if verdict.empty else "steps_handed_over"] += 1
        for row, kept in zip(header.table, verdict.kept, strict=True):
            if row.rank in self._session.share.partitions and not kept:
                self._counts["traces_stale"] += 1
                self._counts["tokens_stale"] += row.mask_sum

    def _acknowledge(self, step: Step) -> None:
        first = self._open_steps[0].step if self._open_steps else None
        if first is not step:
            raise InvalidInputError(self._why_not(step, first))
        self._close_first()
        self._close_skipped()

    def _why_not(self, step: Step, first: Step | None) -> str:
        if first is None or all(item.step is not step for item in self._open_steps):
            return f"step {step.number} is not open: it was acknowledged before, or the stream was moved since"
        return f"step {step.number} cannot be acknowledged before step {first.number}"

    def _close_skipped(self) -> None:
        """Steps of which nothing is left are closed as soon as no step before them is open."""
        while self._open_steps and self._open_steps[0].step is None:
            self._close_first()

    def _close_first(self) -> None:
        first = self._open_steps[0]
        self._loop.call(self._session.acknowledge(first.records, first.verdict))
        self._open_steps.popleft()
        self._counts["steps_acknowledged"] += 1


def _parse_version(version: object) -> PolicyVersion:
    """A number alone does not say which epoch it is of."""
    if isinstance(version, tuple | list) and len(version) == 2:  # noqa: PLR2004  # epoch and version
        return PolicyVersion(*version)
    raise InvalidInputError(
        f"the version to be trained is (epoch, version), not {version!r}: hand in `PolicyPublisher.version`, or what "
        "`update`, `announce` and `resume` return"
    )
