"""Runs a module as a program that ends with the process which started it, kill -9 included.

    python -m rollmill.runtime.supervisor.launch PARENT_PID MODULE [ARGUMENT …]

The parent-death signal fires when the *thread* that started this process ends, so the supervisor has to run in a
thread that lasts. Systems without the signal (macOS) only lack this safety net.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, module: str, *arguments: str) -> None:
    _end_with_parent()
    if os.getppid() != parent:  # the parent ended before the line above
        raise SystemExit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
