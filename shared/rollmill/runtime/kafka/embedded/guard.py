"""Runs a command that must not outlive the program which started this one. A script; the standard library only.

    python guard.py GRACE_SECONDS INHERITED_FD COMMAND …

Standard input is a pipe that only the program holds open. The kernel closes it when the program ends in any way, kill
-9 included; the command then gets SIGTERM and, after the grace, SIGKILL. A parent-death signal alone would not do: it
fires when the *thread* that started the process ends. It is enough for the command, as its parent has one thread when
it starts: if this process is killed, the command goes too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    grace, inherited, *command = arguments
    process = subprocess.Popen(  # noqa: S603 - the command of our own caller
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(int(inherited),),  # the data directory stays locked until the command itself has ended
        preexec_fn=_end_with_this_process,  # noqa: PLW1509 - no threads yet
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    threading.Thread(target=_end_with_the_program, args=(process, float(grace)), daemon=True).start()
    return process.wait()


def _end_with_this_process() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_the_program(process: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
