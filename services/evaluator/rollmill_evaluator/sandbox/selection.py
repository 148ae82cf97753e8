"""Which sandboxes this process has: found when a job first needs one, each with the reason where there is none."""

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
NEEDS = (
    "It needs user namespaces, which containers and kernels can forbid, and sources and tools that its user can read"
)


@dataclass(frozen=True)
class SandboxOptions:
    """What an operator says of sandboxes."""

    bwrap: Path | None = None
    """None: ``bwrap`` on PATH."""
    uid: int = 65534
    tools: tuple[Path, ...] = ()
    cgroup: Path | None = None
    docker: str = "docker"
    jobs: int = 4


@dataclass
class Chosen:
    """A `Sandbox` that is looked for when first needed, and that runs at most ``jobs`` jobs at once.

    Once found it is kept; where there was none, it is looked for again after a while.
    """

    name: str
    find: Callable[[], Awaitable[Sandbox]]
    jobs: int
    again_seconds: float = 60.0
    _found: Sandbox | None = None
    _looked_at: float = -math.inf
    _places: asyncio.Semaphore = field(init=False)
    _finding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.jobs)

    async def run(self, job: Job) -> JobOutcome:
        sandbox = await self.found()
        async with self._places:
            return await sandbox.run(job)

    async def found(self) -> Sandbox:
        async with self._finding:
            if self._found is None or self._is_due():
                self._found = await self.find()
                self._looked_at = time.monotonic()
                why = self._found.why if isinstance(self._found, NoSandbox) else None
                log.info("sandbox", sandbox=self.name, available=why is None, why=why)
        return self._found

    def _is_due(self) -> bool:
        return isinstance(self._found, NoSandbox) and time.monotonic() - self._looked_at >= self.again_seconds


def local_sandbox(options: SandboxOptions) -> Chosen:
    """Bubblewrap on this machine."""

    async def find() -> Sandbox:
        program = options.bwrap or _on_path("bwrap")
        if program is None:
            return NoSandbox(f"no bwrap on PATH: {INSTALL}")
        groups = None if options.cgroup is None else ControlGroups(options.cgroup)
        if groups is not None and (wrong := groups.unfit()) is not None:
            return NoSandbox(wrong)
        sandbox = Bubblewrap(program, _other_user(options.uid), options.tools, groups)
        why = await unavailable(sandbox)
        return sandbox if why is None else NoSandbox(f"{program} does not work here: {why}. {NEEDS}")

    return Chosen("bubblewrap", find, options.jobs)


def container_sandbox(options: SandboxOptions) -> Chosen:
    """Containers of a Docker engine."""

    async def find() -> Sandbox:
        sandbox = Docker(options.docker)
        why = await sandbox.unavailable()
        return sandbox if why is None else NoSandbox(f"no Docker engine: {why}")

    return Chosen("docker", find, options.jobs)


def _other_user(uid: int) -> int | None:
    """A service that is root lets somebody else run untrusted code; any other user stays who it is."""
    return uid if os.geteuid() == 0 and uid != 0 else None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)
