"""What a tree of processes takes at this moment, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmill.strategies.sandbox import JobLimits

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Watch:
    """Tells whether a sandbox takes more memory, or more processes, than its job may.

    It is looked at some times a second, so a job can overshoot by what it takes in between; a control group, where
    there is one, cannot be overshot. Pages that processes share count for each of them.
    """

    limits: JobLimits
    own: int = 0
    """Processes that belong to the sandbox itself."""

    def __call__(self, pid: int) -> bool:
        memory = 0
        for processes, one in enumerate(tree(pid), start=1):
            memory += resident(one)
            if memory > self.limits.memory_bytes or processes > self.limits.processes + self.own:
                return True
        return False


def tree(pid: int) -> Iterator[int]:
    """``pid`` and all its descendants; those of a pid namespace are descendants of the namespace's first process."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += _children(one)


def _children(pid: int) -> list[int]:
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it ended meanwhile
        return []


def resident(pid: int) -> int:
    """Bytes of resident memory; 0 for a process that is no more."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0
