"""Which sandboxes this machine has: looked for when a job first needs one; where there is none, with the reason."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from rollmill.strategies.sandbox import Job, JobOutcome, NoSandbox, Sandbox
from rollmill_evaluator.sandbox.bubblewrap import Bubblewrap, unavailable
from rollmill_evaluator.sandbox.cgroups import ControlGroups
from rollmill_evaluator.sandbox.docker import Docker

log = structlog.get_logger(__name__)

INSTALL = "install bubblewrap (Debian: apt-get install bubblewrap), or name the program in ROLLMILL_SANDBOX_BWRAP"
REQUIREMENTS = (
    "It needs user namespaces, which containers and kernels can forbid, and sources and tools that its user can read"
)


@dataclass(frozen=True)
class SandboxOptions:
    """The operator's settings of sandboxes."""

    bwrap: Path | None = None
    """None: ``bwrap`` on PATH."""
    uid: int = 65534
    tools: tuple[Path, ...] = ()
    cgroup: Path | None = None
    docker: str = "docker"
    jobs: int = 4


@dataclass
class LazySandbox:
    """A `Sandbox` that is looked for when first needed, and that runs at most ``jobs`` jobs at once.

    Once found it is kept; where there was none, it is looked for again after ``retry_seconds``.
    """

    name: str
    find: Callable[[], Awaitable[Sandbox]]
    jobs: int
    retry_seconds: float = 60.0
    _found: Sandbox | None = None
    _searched_at: float = -math.inf
    _slots: asyncio.Semaphore = field(init=False)
    _search_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.jobs)

    async def run(self, job: Job) -> JobOutcome:
        sandbox = await self.found()
        async with self._slots:
            return await sandbox.run(job)

    async def found(self) -> Sandbox:
        async with self._search_lock:
            if self._found is None or self._is_due():
                self._found = await self.find()
                self._searched_at = time.monotonic()
                why = self._found.why if isinstance(self._found, NoSandbox) else None
                log.info("sandbox searched for", sandbox=self.name, available=why is None, why=why)
        return self._found

    def _is_due(self) -> bool:
        return isinstance(self._found, NoSandbox) and time.monotonic() - self._searched_at >= self.retry_seconds


def local_sandbox(options: SandboxOptions) -> LazySandbox:
    """Bubblewrap on this machine."""

    async def find() -> Sandbox:
        program = options.bwrap or _on_path("bwrap")
        if program is None:
            return NoSandbox(f"no bwrap on PATH: {INSTALL}")
        groups = None if options.cgroup is None else ControlGroups(options.cgroup)
        if groups is not None and (problem := groups.unavailable()) is not None:
            return NoSandbox(problem)
        sandbox = Bubblewrap(program, _unprivileged_user(options.uid), options.tools, groups)
        why = await unavailable(sandbox)
        return sandbox if why is None else NoSandbox(f"{program} does not work here: {why}. {REQUIREMENTS}")

    return LazySandbox("bubblewrap", find, options.jobs)


def container_sandbox(options: SandboxOptions) -> LazySandbox:
    """Containers of a Docker engine."""

    async def find() -> Sandbox:
        sandbox = Docker(options.docker)
        why = await sandbox.unavailable()
        return sandbox if why is None else NoSandbox(f"no Docker engine: {why}")

    return LazySandbox("docker", find, options.jobs)


def _unprivileged_user(uid: int) -> int | None:
    """The user that runs untrusted code where the service is root; None, unchanged, where the service is not."""
    return uid if os.geteuid() == 0 and uid != 0 else None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)
