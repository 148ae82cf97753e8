"""``rollmill exec``: a command as one session; its SDKs find capture by their environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rollmill.client import Session
from rollmill.errors import InvalidInputError

NOT_FOUND = 127
BY_SIGNAL = 128
"""Exit codes as a shell has them."""


def execute(session: Session, command: Sequence[str]) -> int:
    """Run ``command`` in a session, which is closed as its exit code says. Returns the exit code."""
    if not command:
        raise InvalidInputError("say what to run, e.g. `rollmill exec --task t1 -- python agent.py`")
    with session:
        code = _run(command, {**os.environ, **session.environment})
        session.finish(error=None if code == 0 else f"exit code {code}")
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603  # the user's own command
    except FileNotFoundError:
        return NOT_FOUND
    with _passing_signals_on(process):
        code = process.wait()
    return BY_SIGNAL - code if code < 0 else code


@contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal is the command's; we stay to close the session."""

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
