"""What an exit code means for whoever keeps a process running (rule T4). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollmill.errors import EXIT_DRAINED, EXIT_FATAL, EXIT_FENCED


class NextStep(StrEnum):
    """``stop``: it is done; ``fatal_exit``: stop everything, an operator has to act; ``restart``: after a pause."""

    STOP = "stop"
    FATAL_EXIT = "fatal_exit"
    RESTART = "restart"


@dataclass(frozen=True)
class RestartDecision:
    next: NextStep
    pause: float = 0.0
    """Seconds before the restart."""


@dataclass(frozen=True)
class RestartPolicy:
    """Pauses in seconds."""

    fenced_pause: float = 30.0
    """The new owner of the task has to be left alone."""
    first_pause: float = 0.5
    longest_pause: float = 30.0
    forgiven_after: float = 60.0
    """A process that ran this long starts with the first pause again."""

    def after(self, exit_code: int, *, failures: int, stop_requested: bool = True) -> RestartDecision:
        """What follows an exit; ``failures`` counts the crashes in a row, this one included.

        Without ``stop_requested`` no exit code means that the process is done: one that ends by itself has failed.
        """
        if exit_code == EXIT_DRAINED and stop_requested:
            return RestartDecision(NextStep.STOP)
        if exit_code == EXIT_FATAL:
            return RestartDecision(NextStep.FATAL_EXIT)
        if exit_code == EXIT_FENCED:
            return RestartDecision(NextStep.RESTART, self.fenced_pause)
        return RestartDecision(
            NextStep.RESTART, min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 16))
        )
