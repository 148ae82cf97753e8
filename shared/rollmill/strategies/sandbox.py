"""The contract of a sandbox: untrusted commands run isolated from the machine, within limits.

An evaluator describes a `Job`; every backend guarantees: no network; the system read-only; private
/tmp, /proc and processes; nothing of the service's environment; the job's limits; and that no process of the job is
left when `Sandbox.run` has returned or was cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rollmill.errors import NotGradedError

SANDBOX_FAILED = "sandbox_failed"
SANDBOX_UNAVAILABLE = "sandbox_unavailable"

WORK = "/sandbox"
"""The job's own writable folder inside the sandbox, empty at the start; /tmp is the other one."""


class SandboxUnavailableError(NotGradedError):
    """There is no such sandbox in this process. Nothing is ever run without one."""

    def __init__(self, detail: str) -> None:
        super().__init__(SANDBOX_UNAVAILABLE, detail)


@dataclass(frozen=True)
class JobLimits:
    """What one job may take."""

    seconds: float = 300.0
    """Wall clock, of the last step."""
    prepare_seconds: float = 60.0
    """Wall clock, of everything before the last step."""
    memory_bytes: int = 2 * 2**30
    """Resident, of all processes together."""
    address_space_bytes: int | None = None
    """Of one process; None: ``memory_bytes``. Runtimes that reserve much (Go, Java, Node) need more."""
    processes: int = 256
    """Threads count."""
    disk_bytes: int = 2**30
    """Of the work folder, and once more of /tmp."""
    open_files: int = 1024
    output_bytes: int = 2**20
    """Of the last step's output that is kept: a head and a tail of it."""
    collect_bytes: int = 4 * 2**20
    """Of one collected file; a larger one is cut."""

    def __post_init__(self) -> None:
        if min(value for value in vars(self).values() if value is not None) <= 0:
            raise ValueError("every limit of a job must be above 0")


@dataclass(frozen=True)
class Step:
    """One command of a job. A job stops at the first that fails."""

    name: str
    argv: tuple[str, ...]

    @classmethod
    def shell(cls, name: str, script: str) -> Step:
        """A step that runs ``script`` with the POSIX shell."""
        return cls(name, ("/bin/sh", "-c", script))


@dataclass(frozen=True)
class Job:
    """Steps that run one after the other in one sandbox, in `WORK`; the output of the last is what counts."""

    steps: tuple[Step, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Read-only files, by absolute path inside."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Read-only files and folders of the machine, by absolute path inside."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All variables of the job, besides PATH, HOME, LANG and TMPDIR."""
    collect: tuple[str, ...] = ()
    """Absolute paths of files that are brought back, whether or not the last step succeeded."""
    image: str | None = None
    """Of a container; a sandbox without containers refuses a job with an image."""
    limits: JobLimits = JobLimits()

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a job needs at least one step")
        for path in (*self.files, *self.mounts, *self.collect):
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise ValueError(f"{path!r} is no absolute path inside a sandbox")


class Ending(StrEnum):
    """How a job ended."""

    EXITED = "exited"
    """Every step ran, or one of them failed."""
    TIMED_OUT = "timed_out"
    """Its last step took too long, or the steps before it did: then a step is missing from `JobOutcome.steps`."""
    EXHAUSTED = "exhausted"
    """Killed for its memory or its number of processes."""
    DIED = "died"
    """It ended without reporting a result: its shell was killed, by the job or from outside."""


@dataclass(frozen=True)
class Output:
    """What was kept of an output: ``head``, then ``dropped`` bytes that were only counted, then ``tail``."""

    head: bytes = b""
    tail: bytes = b""
    dropped: int = 0

    @property
    def text(self) -> str:
        gap = f"\n[{self.dropped} bytes dropped]\n".encode() if self.dropped else b""
        return (self.head + gap + self.tail).decode(errors="replace")


@dataclass(frozen=True)
class StepResult:
    name: str
    exit_code: int
    """128 + n: killed by signal n."""
    output: str = ""
    """The end of what a step before the last one printed."""


@dataclass(frozen=True)
class JobOutcome:
    """The result of a job."""

    ending: Ending
    seconds: float
    steps: tuple[StepResult, ...] = ()
    """Those that ended, in order."""
    output: Output = Output()
    """Of the last step: standard output and error as they came."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The collected ones that were there."""

    def step(self, name: str) -> StepResult | None:
        """The result of a step; None: it did not end."""
        return next((step for step in self.steps if step.name == name), None)


class Sandbox(Protocol):
    """Runs jobs; any number at once, without ever blocking the event loop."""

    async def run(self, job: Job) -> JobOutcome:
        """The outcome of ``job``.

        Raises SandboxUnavailableError where this sandbox does not exist here, InfrastructureError where it failed
        before the job began, InvalidInputError for a job that it cannot run. Cancelling kills the job.
        """
        ...


@dataclass(frozen=True)
class NoSandbox:
    """The sandbox of a process that has none."""

    why: str

    async def run(self, job: Job) -> JobOutcome:  # noqa: ARG002  # the protocol's signature
        raise SandboxUnavailableError(self.why)
