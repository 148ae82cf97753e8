"""Settings of the evaluator, from ``ROLLMILL_*`` environment variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from rollmill.settings import ServiceSettings
from rollmill.topics import EVALUATIONS
from rollmill_evaluator.grading import Limits
from rollmill_evaluator.group import GroupLimits
from rollmill_evaluator.sandbox.choosing import SandboxOptions


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
    evaluator_sources: Path | None = None
    """The folder below which specs name repositories, bundles and archives; nothing else can be named."""
    sandbox_bwrap: Path | None = None
    """The program bubblewrap; None: ``bwrap`` on PATH. Without it, specs that run code are not graded
    (``sandbox_unavailable``)."""
    sandbox_uid: NonNegativeInt = 65534
    """Who runs untrusted code where the service is root; the sources and tools must be readable to that user. 0: root
    stays root, in a user namespace of its own."""
    sandbox_tools: tuple[Path, ...] = ()
    """Files and folders that sandboxes see read-only beside /usr, such as a language's installation; a JSON list."""
    sandbox_cgroup: Path | None = None
    """A cgroup (v2) with the controllers memory and pids that was delegated to the service: limits by the kernel.
    None: by resource limits, and by looking at the processes some times a second."""
    sandbox_jobs: PositiveInt = 4
    """Jobs at once, for each kind of sandbox: each may take the memory that its spec asks for."""
    sandbox_docker: str = "docker"
    """The command line of the engine that runs containers."""
    commit_seconds: float = Field(default=1.0, gt=0)
    """How often finished work is committed: what a crash repeats at most, beside what is running."""

    @property
    def sandboxes(self) -> SandboxOptions:
        return SandboxOptions(
            bwrap=self.sandbox_bwrap,
            uid=self.sandbox_uid,
            tools=self.sandbox_tools,
            cgroup=self.sandbox_cgroup,
            docker=self.sandbox_docker,
            jobs=self.sandbox_jobs,
        )

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
