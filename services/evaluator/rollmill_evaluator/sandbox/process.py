"""One process that holds a whole sandbox: started, listened to within caps, watched, and always ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollmill.strategies.sandbox import Ending, Output
from rollmill_evaluator.sandbox.output import CappedOutput

CHUNK = 2**16
WATCH_SECONDS = 0.05
END_SECONDS = 10.0
"""How long a killed process may take to be gone."""

IsExhausted = Callable[[int], bool]
"""Takes the process id of a sandbox; True: it takes more than it may."""


@dataclass(frozen=True)
class Command:
    """What to start, and as whom."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    uid: int | None = None
    """User and group to become; None: those of this process."""


@dataclass(frozen=True)
class Bounds:
    prepare_seconds: float
    """Until ``mark`` is reported."""
    seconds: float
    """From then on."""
    mark: bytes
    output_bytes: int
    report_bytes: int


@dataclass(frozen=True)
class Ended:
    """How the process ended, and what it wrote."""

    ending: Ending
    seconds: float
    output: Output
    reports: bytes
    exit_code: int


async def run(
    command: Command, bounds: Bounds, exhausted: IsExhausted, kill: Callable[[], None] | None = None
) -> Ended:
    """Run ``command`` to its end, or to the end of what it may take. On return, and on cancellation, it is gone.

    ``kill`` ends what the process does not take with itself. Raises OSError where it cannot be started.
    """
    began = time.monotonic()
    process = await _start(command)
    output, reports = CappedOutput(bounds.output_bytes), CappedOutput(2 * bounds.report_bytes)
    deadline = _Deadline(bounds)
    listening = asyncio.gather(
        _listen(process.stdout, output.add),
        _listen(process.stderr, reports.add, deadline.hear),
    )
    try:
        ending = await _until_ended(process, deadline, exhausted)
    finally:
        await _end(process, listening, kill)
    said = reports.kept()
    return Ended(ending, time.monotonic() - began, output.kept(), said.head + said.tail, process.returncode or 0)


async def _start(command: Command) -> asyncio.subprocess.Process:
    other = command.uid is not None
    return await asyncio.create_subprocess_exec(
        *command.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(command.environment),
        pass_fds=command.descriptors,
        start_new_session=True,
        cwd="/",
        user=command.uid,
        group=command.uid,
        extra_groups=() if other else None,
    )


class _Deadline:
    """Moves once: when the mark is heard."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._at = time.monotonic() + bounds.prepare_seconds
        self._heard: bytes | None = b""

    @property
    def left(self) -> float:
        return self._at - time.monotonic()

    def hear(self, chunk: bytes) -> None:
        if self._heard is None:
            return
        heard = self._heard + chunk
        self._heard = heard[-len(self._bounds.mark) :]
        if self._bounds.mark in heard:
            self._at, self._heard = time.monotonic() + self._bounds.seconds, None


async def _listen(stream: asyncio.StreamReader | None, *hearers: Callable[[bytes], None]) -> None:
    while stream is not None and (chunk := await stream.read(CHUNK)):
        for hear in hearers:
            hear(chunk)


async def _until_ended(process: asyncio.subprocess.Process, deadline: _Deadline, exhausted: IsExhausted) -> Ending:
    gone = asyncio.ensure_future(process.wait())
    try:
        while (left := deadline.left) > 0:
            done, _ = await asyncio.wait((gone,), timeout=min(left, WATCH_SECONDS))
            if done:
                return Ending.EXITED
            if exhausted(process.pid):
                return Ending.EXHAUSTED
        return Ending.TIMED_OUT
    finally:
        gone.cancel()


async def _end(
    process: asyncio.subprocess.Process, listening: asyncio.Future[tuple[None, None]], kill: Callable[[], None] | None
) -> None:
    """Kill what is left; then the pipes end, because nobody holds them any more."""
    with suppress(ProcessLookupError):
        process.kill()
    if kill is not None:
        kill()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
            await asyncio.shield(listening)
    except TimeoutError:
        listening.cancel()
