"""Every error of Rollmill, typed by what has to happen next.

RollmillError
├── RetryableError        the same call may succeed later; retried with a budget
│   └── InfrastructureError   what an evaluator depends on failed; after the last try: not graded, with a reason
├── NotGradedError        an evaluator can give no number, and trying again does not help: not graded, with a reason
├── PoisonRecordError     this record only: dead letter with a reason code, go on; ours count towards a limit
├── BackpressureError     come back later; HTTP 429 or 503 with Retry-After
├── InvalidInputError     the caller's input is wrong; HTTP 4xx with advice
└── FatalError            stop the process; an operator has to act (exit code 70)
    ├── ConfigurationError    settings or cluster contradict what the code needs
    └── FencedError           another owner has taken the task (exit code 75)
"""

from __future__ import annotations

EXIT_DRAINED = 0
EXIT_NOT_IN_ORDER = 3
"""A command has looked, and what it looks at is not in order: an unbalanced ledger, a stopped task, a bad setting."""
EXIT_CRASHED = 1
"""Something outside failed for too long; starting again may help."""
EXIT_FATAL = 70
EXIT_FENCED = 75

OWN_FAULTS = frozenset({"stage_error", "outputs_refused", "output_too_large"})
"""Reasons of dead letters that a fault of this code or its settings gives, and no content of a record alone. Only they
count towards the limit that stops a task (rule T6); every other reason is what a client can cause."""


class RollmillError(Exception):
    """Base of all errors raised on purpose."""


class RetryableError(RollmillError):
    """The same call may succeed later."""


class InfrastructureError(RetryableError):
    """What an evaluator depends on failed, not what it grades. ``reason`` is a stable code for the evaluation.

    ``retry_after``: seconds until the next try, where the other side gave it.
    """

    def __init__(self, reason: str, detail: str, *, retry_after: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.retry_after = retry_after


class NotGradedError(RollmillError):
    """No number can be given, now or later. ``reason`` is a stable code for the evaluation."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class PoisonRecordError(RollmillError):
    """A record that can never be processed. ``reason`` is a stable code for counters and dead letters.

    ``units_held``: the units it carries are held by an accepted record, so its dead letter closes no account.
    """

    def __init__(self, reason: str, detail: str, *, units_held: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.units_held = units_held

    @property
    def own_fault(self) -> bool:
        """Whether it counts towards the limit of dead letters: it is ours, and not the client's."""
        return self.reason in OWN_FAULTS


class BackpressureError(RollmillError):
    """Come back after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvalidInputError(RollmillError):
    """The caller's input is wrong; the message says what to do about it."""


class FatalError(RollmillError):
    """The process has to stop, and an operator has to act."""

    exit_code = EXIT_FATAL


class ConfigurationError(FatalError):
    """Settings, or the cluster as found, contradict what the code needs."""


class FencedError(FatalError):
    """Another process owns the task now; this one must not come back by itself (rule T4)."""

    exit_code = EXIT_FENCED
