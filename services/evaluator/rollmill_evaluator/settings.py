"""Settings of the evaluator, from ``ROLLMILL_*`` environment variables."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from rollmill.settings import ServiceSettings
from rollmill.topics import EVALUATIONS
from rollmill_evaluator.grading import Limits
from rollmill_evaluator.group import GroupLimits


class EvaluatorSettings(ServiceSettings):
    evaluator_concurrency: PositiveInt = 32
    """Evaluations at once, for each strategy by itself."""
    evaluator_records: PositiveInt = 256
    """Sessions in flight; above it polling pauses. Also bounds what a crash repeats."""
    evaluator_bytes: PositiveInt = 256 * 2**20
    """Of the records in flight: bounds memory."""
    evaluator_seconds: float = Field(default=600.0, gt=0)
    """Longest time for one evaluation; below a session's `evaluation_seconds`, so that ``evaluator_timeout`` is said
    before the reward-merger stops waiting."""
    evaluator_attempts: PositiveInt = 3
    """Tries, where an evaluator raises RetryableError."""
    evaluator_retry_seconds: float = Field(default=0.5, ge=0)
    commit_seconds: float = Field(default=1.0, gt=0)
    """How often finished work is committed: what a crash repeats at most, beside what is running."""

    @property
    def limits(self) -> Limits:
        return Limits(
            seconds=self.evaluator_seconds,
            attempts=self.evaluator_attempts,
            retry_seconds=self.evaluator_retry_seconds,
            bytes=EVALUATIONS.max_bytes,
        )

    @property
    def group_limits(self) -> GroupLimits:
        return GroupLimits(
            records=self.evaluator_records,
            bytes=self.evaluator_bytes,
            poll_seconds=self.poll_ms / 1000,
            commit_seconds=self.commit_seconds,
            drain_seconds=self.drain_seconds / 2,
            deadline_seconds=self.deadline_seconds,
            join_seconds=self.deadline_seconds + 2 * self.session_timeout_ms / 1000,
        )
