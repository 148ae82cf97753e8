"""Memory and number of processes of a process tree at this moment, read from /proc.

What is stored in a tmpfs is memory that no process has mapped, so the file systems of a sandbox are measured, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.strategies.sandbox import JobLimits

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class UsageCheck:
    """Whether a sandbox uses more memory, or more processes, than its job may.

    It is called several times a second, so a job can exceed its limits in between; a control group, where there is
    one, cannot be exceeded. Pages that processes share count for each of them, and once more where they are a file's in
    a tmpfs.
    """

    limits: JobLimits
    own: int = 0
    """Processes that belong to the sandbox itself."""
    tmpfs: Mapping[str, int] = field(default_factory=dict)
    """Path inside the sandbox, and size in bytes, of every file system in memory that the job can write to."""

    def __call__(self, pid: int) -> bool:
        memory, measured = 0, False
        for processes, process in enumerate(process_tree(pid), start=1):
            memory += resident_bytes(process)
            if not measured:
                stored = tmpfs_bytes(process, self.tmpfs)
                measured, memory = stored is not None, memory + (stored or 0)
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


def tmpfs_bytes(pid: int, tmpfs: Mapping[str, int]) -> int | None:
    """Bytes stored in these file systems as ``pid`` sees them; None: it is outside of the sandbox, or has ended.

    bubblewrap's own first process is outside, and its second one is for a moment: they see the machine's file systems,
    which have other sizes.
    """
    stored = [_stored_bytes(PROC / str(pid) / "root" / path.lstrip("/"), size) for path, size in tmpfs.items()]
    return None if None in stored or not stored else sum(filter(None, stored))


def _stored_bytes(path: Path, size: int) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    if found.f_blocks * found.f_frsize != -(-size // PAGE) * PAGE:
        return None
    return (found.f_blocks - found.f_bfree) * found.f_frsize
