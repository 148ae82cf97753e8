"""Memory and number of processes of a process tree at this moment, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmill.strategies.sandbox import JobLimits

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class UsageCheck:
    """Whether a sandbox uses more memory, or more processes, than its job may.

    It is called several times a second, so a job can exceed its limits in between; a control group, where there is
    one, cannot be exceeded. Pages that processes share count for each of them.
    """

    limits: JobLimits
    own: int = 0
    """Processes that belong to the sandbox itself."""

    def __call__(self, pid: int) -> bool:
        memory = 0
        for processes, process in enumerate(process_tree(pid), start=1):
            memory += resident_bytes(process)
            if memory > self.limits.memory_bytes or processes > self.limits.processes + self.own:
                return True
        return False


def process_tree(pid: int) -> Iterator[int]:
    """``pid`` and all its descendants; processes of a pid namespace descend from the namespace's first process."""
    pending = [pid]
    while pending:
        process = pending.pop()
        yield process
        pending += _children(process)


def _children(pid: int) -> list[int]:
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it ended meanwhile
        return []


def resident_bytes(pid: int) -> int:
    """Bytes of resident memory; 0 for a process that has ended."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0
