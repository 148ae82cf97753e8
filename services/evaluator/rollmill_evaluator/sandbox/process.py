"""Runs one process that holds a whole sandbox: its output is bounded, its usage checked, and it is always ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollmill.strategies.sandbox import Ending, Output

CHUNK = 2**16
USAGE_CHECK_SECONDS = 0.05
END_SECONDS = 10.0
"""How long a killed process may take to end."""
MOST_OUTPUT_BYTES = 16 * 2**20
"""Of an output that is kept, whatever a job's limits allow: it is held in this process's own memory."""

IsExhausted = Callable[[int], bool]
"""Takes the process id of a sandbox; True: it uses more than its limits."""


@dataclass(frozen=True)
class Command:
    """What to start, and as which user."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    uid: int | None = None
    """User and group to become; None: those of this process."""


@dataclass(frozen=True)
class ProcessLimits:
    prepare_seconds: float
    """Until ``last_step_mark`` is reported."""
    seconds: float
    """From then on."""
    last_step_mark: bytes
    output_bytes: int
    report_bytes: int


@dataclass(frozen=True)
class ProcessResult:
    """How the process ended, and what it wrote."""

    ending: Ending
    seconds: float
    output: Output
    reports: bytes
    exit_code: int


async def run(command: Command, limits: ProcessLimits, exhausted: IsExhausted) -> ProcessResult:
    """Run ``command`` until it ends or reaches a limit. On return, and on cancellation, it has ended.

    Raises OSError where it cannot be started.
    """
    began = time.monotonic()
    process = await _start(command)
    output = CappedOutput(min(limits.output_bytes, MOST_OUTPUT_BYTES))
    reports = CappedOutput(2 * limits.report_bytes)
    deadline = _Deadline(limits)
    reading = asyncio.gather(
        _read_stream(process.stdout, output.add),
        _read_stream(process.stderr, reports.add, deadline.feed),
    )
    try:
        ending = await _until_ended(process, deadline, exhausted)
    finally:
        await _end(process, reading)
    reported = reports.kept()
    return ProcessResult(
        ending, time.monotonic() - began, output.kept(), reported.head + reported.tail, process.returncode or 0
    )


async def _start(command: Command) -> asyncio.subprocess.Process:
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
        extra_groups=None if command.uid is None else (),
    )


class _Deadline:
    """Moves once: when the last step is reported to begin."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._limits = limits
        self._at = time.monotonic() + limits.prepare_seconds
        self._unmatched: bytes | None = b""
        """The end of the reports so far, where the mark may have begun; None: the mark was found."""

    @property
    def left(self) -> float:
        return self._at - time.monotonic()

    def feed(self, chunk: bytes) -> None:
        if self._unmatched is None:
            return
        reports = self._unmatched + chunk
        self._unmatched = reports[-len(self._limits.last_step_mark) :]
        if self._limits.last_step_mark in reports:
            self._at, self._unmatched = time.monotonic() + self._limits.seconds, None


async def _read_stream(stream: asyncio.StreamReader | None, *sinks: Callable[[bytes], None]) -> None:
    while stream is not None and (chunk := await stream.read(CHUNK)):
        for sink in sinks:
            sink(chunk)


async def _until_ended(process: asyncio.subprocess.Process, deadline: _Deadline, exhausted: IsExhausted) -> Ending:
    exited = asyncio.ensure_future(process.wait())
    try:
        while (left := deadline.left) > 0:
            done, _ = await asyncio.wait((exited,), timeout=min(left, USAGE_CHECK_SECONDS))
            if done:
                return Ending.EXITED
            if exhausted(process.pid):
                return Ending.EXHAUSTED
        return Ending.TIMED_OUT
    finally:
        exited.cancel()


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Future[tuple[None, None]]) -> None:
    """Kill what still runs; then the pipes reach their end, because no process has them open."""
    with suppress(ProcessLookupError):
        process.kill()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
            await asyncio.shield(reading)
    except TimeoutError:
        reading.cancel()


class CappedOutput:
    """Keeps at most ``limit`` bytes of what is added, half from the start and half from the end; counts the rest.

    It holds two buffers, and no list of chunks: a job that writes byte by byte would fill that with objects.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        room = self._head_limit - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > self._tail_limit + max(self._tail_limit // 2, CHUNK):
            self._shorten()  # not for each chunk, because what is left is moved

    def _shorten(self) -> None:
        over = max(0, len(self._tail) - self._tail_limit)
        del self._tail[:over]
        self._dropped += over

    def kept(self) -> Output:
        self._shorten()
        return Output(bytes(self._head), bytes(self._tail), self._dropped)
