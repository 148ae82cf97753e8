"""A control group (cgroup v2) per job, below one that was delegated to the service: hard limits by the kernel."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rollmill.strategies.sandbox import JobLimits
from rollmill_evaluator.sandbox.process import Command

CONTROLLERS = {"memory", "pids"}
OWN_PROCESSES = 8
ENTER = 'echo 0 > "$1/cgroup.procs" && shift && exec "$@"'


@dataclass(frozen=True)
class ControlGroup:
    """One job's control group."""

    path: Path

    def enter_first(self, command: Command) -> Command:
        """``command``, started by a shell that enters the group first, so that no process is ever outside of it."""
        argv = (*_change_user(command.uid), *command.argv)
        return replace(command, argv=("/bin/sh", "-c", ENTER, "sandbox", str(self.path), *argv), uid=None)

    def exhausted(self) -> bool:
        """True where the kernel killed a process of the group at the memory limit."""
        try:
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        except (OSError, ValueError):
            return False
        return int(events.get("oom_kill", 0)) > 0


def _change_user(uid: int | None) -> tuple[str, ...]:
    """Change the user only after entering the group: another user may not enter it."""
    if uid is None:
        return ()
    return ("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--")


@dataclass(frozen=True)
class ControlGroups:
    """Makes and removes the groups of jobs below ``parent``."""

    parent: Path

    def unavailable(self) -> str | None:
        """Why ``parent`` cannot hold groups with limits; None: it can."""
        try:
            controlled = set((self.parent / "cgroup.subtree_control").read_text().split())
        except OSError as error:
            return f"{self.parent} is not a control group (v2): {error}"
        if missing := CONTROLLERS - controlled:
            return f"{self.parent}/cgroup.subtree_control lacks {', '.join(sorted(missing))}"
        if not os.access(self.parent, os.W_OK):
            return f"{self.parent} is not writable: delegate it to the service's user"
        return None

    @contextmanager
    def group(self, limits: JobLimits) -> Iterator[ControlGroup]:
        self._remove_empty()
        path = self.parent / f"job-{secrets.token_hex(8)}"
        path.mkdir()
        try:
            (path / "memory.max").write_text(str(limits.memory_bytes))
            (path / "memory.oom.group").write_text("1")
            (path / "pids.max").write_text(str(limits.processes + OWN_PROCESSES))
            with suppress(OSError):  # absent where there is no swap
                (path / "memory.swap.max").write_text("0")
            yield ControlGroup(path)
        finally:
            with suppress(OSError):
                (path / "cgroup.kill").write_text("1")
            self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the groups without processes; the kernel refuses to remove the others."""
        for path in self.parent.glob("job-*"):
            with suppress(OSError):
                path.rmdir()
