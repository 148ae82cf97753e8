"""`PolicyPublisher`: the trainer announces that every engine has loaded a version (rule R1)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rollmill.errors import InvalidInputError
from rollmill.models import PolicyAnnouncement, PolicyVersion
from rollmill.models.versions import LARGEST_VERSION, skips_epochs
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.connection_diagnostics import await_broker
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.settings import KafkaSettings, load
from rollmill.topics import POLICIES
from rollmill.trainer.event_loop_thread import EventLoopThread
from rollmill.trainer.policy.capture_client import Captures
from rollmill.trainer.policy.history import PolicyHistory, read_history
from rollmill.trainer.producer_records import to_producer_record
from rollmill.trainer.transactional_writer import TransactionalWriter


class PolicyPublisher:
    """Announces versions of one policy, from one process of the trainer (rank 0).

    Every method returns once Kafka has acknowledged. Starting a second publisher of the policy fences the first.
    ``captures``: those that ``update`` pauses while the engines load.
    """

    def __init__(
        self,
        policy: str = "policy",
        run: str | None = None,
        settings: KafkaSettings | None = None,
        clock: Clock | None = None,
        captures: Captures | None = None,
    ) -> None:
        self._settings = settings or load(KafkaSettings)
        self._policy = policy
        self._run = run or self._settings.run
        self._clock = clock or SystemClock()
        self._captures = captures or Captures()
        self._clients = KafkaClients(self._settings)
        name = f"{self._settings.prefix}policy.{policy}"
        self._writer = TransactionalWriter(self._clients, name, self._settings.transaction_timeout_ms)
        self._loop = EventLoopThread(f"rollmill-policy-{policy}")
        self._known: PolicyHistory | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> PolicyVersion:
        """The newest announced version; (0, 0) before the first."""
        return self._history.newest or PolicyVersion()

    def announce(self, version: PolicyVersion | int) -> PolicyVersion:
        """Announce what the engines hold, e.g. at the start; announcing the newest version again does nothing.

        A plain number is a version of the newest epoch. Raises InvalidInputError for an older version.
        """
        wanted = self._full(version)
        if wanted == self._history.newest:
            return wanted
        return self._write(wanted)

    def update(
        self,
        version: PolicyVersion | int,
        load: Callable[[], object] | None = None,
        *,
        mode: str = "wait",
        wait_seconds: float = 600.0,
        cache_reset: bool = False,
    ) -> PolicyVersion:
        """Announce that all engines have loaded new weights. Raises InvalidInputError unless the version is newer.

        With ``load``, a function that makes them do so: ``captures`` are paused, it runs, they are resumed with the new
        version, and it is announced (rule A12). ``mode``: what happens to calls in flight (``wait``, for at most
        ``wait_seconds``; ``keep``; ``abort_resume``). ``cache_reset``: the engines drop their prefix caches with it.

        Where ``load`` fails it is unknown what the engines hold: its error is raised, and captures stay paused until
        a second ``update`` or ``release``.
        """
        wanted = self._full(version)
        if wanted == self._history.newest:
            raise InvalidInputError(f"version {wanted} is announced already; other weights need another number")
        if load is not None:
            self._refuse_backwards(wanted, None)
            self._captures.pause(self._policy, mode, wait_seconds)
            load()
            self._captures.resume(self._policy, wanted, cache_reset=cache_reset)
        return self._write(wanted)

    def release(self) -> None:
        """After an update that failed: calls go on, and the engines hold the version from before it."""
        self._captures.resume(self._policy, None, cache_reset=False)

    def resume(self, version: int, epoch: int | None = None) -> PolicyVersion:
        """A new epoch after loading a checkpoint of ``version``: all that was announced above it is another policy.

        ``epoch``: None takes the next. Raises InvalidInputError for an epoch that was used before, or is not the next.
        """
        newest = self.version.epoch
        wanted = PolicyVersion(newest + 1 if epoch is None else epoch, version)
        if wanted.epoch <= newest:
            raise InvalidInputError(
                f"epoch {wanted.epoch} of policy {self._policy!r} was used already; the next is {newest + 1}"
            )
        return self._write(wanted, resumed_from=version)

    def close(self) -> None:
        if self._loop.running:
            self._loop.call(self._writer.close())
        self._loop.close()

    @property
    def _history(self) -> PolicyHistory:
        if self._known is None:
            self._known = self._loop.call(self._open())
        return self._known

    async def _open(self) -> PolicyHistory:
        # In this order: starting the producer ends what a predecessor left open, so that the reading sees its end.
        await await_broker(self._settings)
        await self._writer.start()
        return await read_history(self._clients, self._settings, self._policy, self._writer.deadline_seconds)

    def _full(self, version: PolicyVersion | int) -> PolicyVersion:
        return PolicyVersion(self.version.epoch, version) if isinstance(version, int) else PolicyVersion(*version)

    def _write(self, version: PolicyVersion, *, resumed_from: int | None = None) -> PolicyVersion:
        if max(version) > LARGEST_VERSION:
            raise InvalidInputError(f"policy version {version} is above {LARGEST_VERSION}: count updates from 0")
        self._refuse_backwards(version, resumed_from)
        self._refuse_skipped_epochs(version)
        announcement = PolicyAnnouncement(
            policy=self._policy, version=version, resumed_from=resumed_from, run=self._run, at=self._clock.now()
        )
        self._loop.call(self._writer.write([to_producer_record(POLICIES, self._policy, announcement, self._settings)]))
        self._known = self._history.adding(announcement)
        return version

    def _refuse_skipped_epochs(self, version: PolicyVersion) -> None:
        newest = self._history.newest
        if newest is not None and skips_epochs(version, newest):
            raise InvalidInputError(
                f"epoch {version.epoch} of policy {self._policy!r} skips epochs: the next one is {newest.epoch + 1}; "
                "every reader would ignore the announcement"
            )

    def _refuse_backwards(self, version: PolicyVersion, resumed_from: int | None) -> None:
        newest = self._history.newest
        if newest is None or resumed_from is not None:
            return
        if version.epoch != newest.epoch:
            raise InvalidInputError(
                f"epoch {version.epoch} is not the running epoch {newest.epoch}; a checkpoint needs resume()"
            )
        if version < newest:
            raise InvalidInputError(
                f"version {version} is older than {newest}; after loading a checkpoint call resume()"
            )
