"""Named places where a program can be killed, made to fail or suspended, for tests of what follows (rule C6).

Off unless ``ROLLMILL_FAILPOINTS`` names some: ``NAME=ACTION@PASS``, comma-separated, e.g.
``transaction.before_commit=kill@3,restore.claimed=pause:12``. The action happens at that pass alone, counted from 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from rollmill.errors import InvalidInputError, RetryableError


class Failpoint(StrEnum):
    """Every place, in the order in which data passes them."""

    CAPTURE_BEFORE_ACKNOWLEDGEMENT = "capture.before_acknowledgement"
    """The reply is complete, and nothing of it is in the log."""
    CAPTURE_AFTER_ACKNOWLEDGEMENT = "capture.after_acknowledgement"
    """The log or the spool has the record, and the client has no reply yet."""
    RESTORE_CLAIMED = "restore.claimed"
    """The former owner is fenced, and nothing of the changelog is read."""
    RESTORE_READ = "restore.read"
    """The changelog is read, and the input is not opened."""
    TRANSACTION_BEFORE_SENDS = "transaction.before_sends"
    TRANSACTION_BETWEEN_SENDS = "transaction.between_sends"
    """Once between each two records: between outputs, changelog and position."""
    TRANSACTION_AFTER_SENDS = "transaction.after_sends"
    """Every record is acknowledged, the input's offsets are not in the transaction."""
    TRANSACTION_BEFORE_COMMIT = "transaction.before_commit"
    TRANSACTION_AFTER_COMMIT = "transaction.after_commit"
    """The log has the transaction, and this process has no answer yet."""
    EVALUATOR_BEFORE_PUBLISH = "evaluator.before_publish"
    EVALUATOR_AFTER_PUBLISH = "evaluator.after_publish"
    """The evaluation is in the log, the position is not committed."""
    TRAINER_BEFORE_ACK = "trainer.before_ack"
    TRAINER_AFTER_ACK = "trainer.after_ack"


class Action(StrEnum):
    KILL = "kill"
    """SIGKILL to this process."""
    RAISE = "raise"
    """FailpointError."""
    PAUSE = "pause"
    """The whole process is suspended for so many seconds, as in a long garbage collection."""


class FailpointError(RetryableError):
    """Raised on purpose."""


@dataclass(frozen=True)
class Armed:
    """What happens at one pass of one place."""

    name: Failpoint
    action: Action
    at: int = 1
    """Pass, counted from 1."""
    seconds: float = 0.0
    """For ``pause``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """One entry of the setting. Raises InvalidInputError, e.g. for an unknown name."""
        name, _, what = text.strip().partition("=")
        action, _, at = what.partition("@")
        verb, _, seconds = action.partition(":")
        try:
            armed = cls(Failpoint(name), Action(verb), int(at or 1), float(seconds or 0))
        except ValueError as error:
            raise InvalidInputError(
                f"{text!r} is no failpoint ({error}): NAME=kill|raise|pause:SECONDS, then @PASS; the names are "
                + ", ".join(Failpoint)
            ) from error
        if armed.at < 1 or armed.seconds < 0:
            raise InvalidInputError(f"{text!r}: passes count from 1, and seconds from 0")
        return armed


class Failpoints:
    """Counts the passes of one process, or of one client."""

    def __init__(self, armed: Iterable[Armed] = ()) -> None:
        self._armed = tuple(armed)
        self._passes: Counter[Failpoint] = Counter()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of the setting; empty: none. Raises InvalidInputError."""
        return cls(Armed.parse(entry) for entry in text.split(",") if entry.strip())

    def reach(self, name: Failpoint) -> None:
        """Called at the place itself; nothing happens where nothing is armed."""
        if not self._armed:
            return
        self._passes[name] += 1
        for armed in self._armed:
            if armed.name is name and armed.at == self._passes[name]:
                _act(armed)


def _act(armed: Armed) -> None:
    if armed.action is Action.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if armed.action is Action.RAISE:
        raise FailpointError(f"failpoint {armed.name.value}, pass {armed.at}")
    time.sleep(armed.seconds)
