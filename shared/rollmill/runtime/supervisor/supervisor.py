"""Starts programs, restarts them by their exit codes, tells when they are ready, drains them in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollmill.errors import EXIT_DRAINED, ConfigurationError, FatalError
from rollmill.runtime.kafka.embedded.ports import free_port
from rollmill.runtime.supervisor.restart_policy import NextStep, RestartDecision, RestartPolicy

HOST = "127.0.0.1"
PROBE_SECONDS = 0.1
ANSWER_SECONDS = 2.0
"""Of a health server."""
LOG_TAIL_BYTES = 20_000
DEFAULT_POLICY = RestartPolicy()

REFUSED = "rollmill: "
"""Begins the one line of a program that was refused before it had a log."""

DRAIN_ORDER = ("capture", "builder", "evaluator", "reward-merger", "batcher")
"""From the source downstream: what one service still emits, the next one can still take."""


@dataclass(frozen=True)
class Program:
    """A Python module to run as a process; ``env`` is laid over the supervisor's own environment."""

    name: str
    module: str
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    health_port: int | None = None
    """None: a free one."""


@dataclass
class _Child:
    """One program and what is known of its process."""

    program: Program
    health_port: int
    log: Path
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    process: Process | None = None
    monitor: asyncio.Task[None] | None = None
    starts: int = 0
    failures: int = 0
    last_exit: int | None = None

    def why(self) -> str:
        """The last error in the log, in one line; without one, the log's last line."""
        if not self.log.exists():
            return f"{self.log} is empty"
        lines = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        errors = filter(None, map(error_of, reversed(lines)))
        return f"{next(errors, None) or (lines or ['it wrote nothing'])[-1]} (log: {self.log})"


class Supervisor:
    """Runs programs under names. Use as an async context manager: leaving it drains what still runs.

    Every process gets a session of its own, so that Ctrl-C reaches the supervisor alone, and ends when the thread
    that started it ends. ``report`` gets one plain line for everything that happens.
    """

    def __init__(
        self,
        log_directory: Path,
        *,
        environment: Mapping[str, str],
        report: Callable[[str], None],
        policy: RestartPolicy = DEFAULT_POLICY,
    ) -> None:
        self._logs = log_directory
        self._environment = dict(environment)
        self._report = report
        self._policy = policy
        self._children: dict[str, _Child] = {}
        self._fatal_exit: asyncio.Future[str] | None = None

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._fatal_exit = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, program: Program) -> None:
        """Start a program and keep it running. Raises FatalError where one of that name runs."""
        if (known := self._children.get(program.name)) and known.monitor and not known.monitor.done():
            raise FatalError(f"{program.name} runs already")
        child = _Child(program, program.health_port or free_port(), self._logs / f"{program.name}.log")
        self._children[program.name] = child
        await self._spawn(child)
        child.monitor = asyncio.create_task(self._monitor(child), name=f"monitor {program.name}")

    async def wait_ready(self, *names: str, timeout: float = 90.0) -> None:  # noqa: ASYNC109  # callers read it as such
        """Wait until ``/ready`` of the named programs (none named: all) answers.

        Raises FatalError, with the last error of its log, when a program gave up or is not ready in time.
        """
        for name in names or tuple(self._children):
            child = self._children[name]
            try:
                async with asyncio.timeout(timeout):
                    await self._until_ready(child)
            except TimeoutError as error:
                message = f"{name} is not ready after {timeout:g} s: {child.why()}"
                raise FatalError(message) from error

    def health_url(self, name: str) -> str:
        """Base of /live, /ready and /metrics of a program; the same over its restarts."""
        return f"http://{HOST}:{self._children[name].health_port}"

    def pid(self, name: str) -> int | None:
        """Process id; None while it does not run."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    def starts(self, name: str) -> int:
        """How often the program was started."""
        return self._children[name].starts

    def log_file(self, name: str) -> Path:
        return self._children[name].log

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, SIGKILL to what the program started, too. It is restarted as after any crash."""
        if (pid := self.pid(name)) is not None:
            self._report(f"{name}: {number.name} to process {pid}")
            _signal(pid, number)

    async def stop(self, name: str, patience: float = 30.0) -> int | None:
        """Drain one program (SIGTERM; SIGKILL after ``patience`` seconds). Returns its last exit code."""
        child = self._children[name]
        child.stopping.set()
        if (pid := self.pid(name)) is not None:
            self._report(f"{name}: draining")
            _signal(pid, signal.SIGTERM)
        if child.monitor is not None and not await _done_within(child.monitor, patience):
            self.kill(name)
            await child.monitor
        return child.last_exit

    async def close(self) -> None:
        """Drain everything, in the order of the starts."""
        for name in list(self._children):
            await self.stop(name)
        if self._fatal_exit is not None and not self._fatal_exit.done():
            self._fatal_exit.cancel()

    async def fatal_exit(self) -> str:
        """Wait for a program that must not be restarted (exit code 70); the message says which and why."""
        if self._fatal_exit is None:
            raise RuntimeError("the supervisor is not entered yet")
        return await asyncio.shield(self._fatal_exit)

    async def _spawn(self, child: _Child) -> None:
        environment = {**self._environment, **child.program.env, "ROLLMILL_HEALTH_PORT": str(child.health_port)}
        launch = (sys.executable, "-m", "rollmill.runtime.supervisor.launch", str(os.getpid()))
        command = (*launch, child.program.module, *child.program.arguments)
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        child.starts += 1
        self._report(f"{child.program.name}: started, process {child.process.pid}")

    async def _monitor(self, child: _Child) -> None:
        while True:
            decision = await self._exit_decision(child)
            if decision.next is NextStep.FATAL_EXIT:
                self._report_fatal_exit(child)
            if decision.next is not NextStep.RESTART or child.stopping.is_set():
                return
            self._report(f"{child.program.name}: restart in {decision.pause:g} s")
            if await _set_within(child.stopping, decision.pause):
                return
            await self._spawn(child)

    async def _exit_decision(self, child: _Child) -> RestartDecision:
        """Wait for the end of the process; what follows by the policy."""
        began = time.monotonic()
        if child.process is None:
            raise RuntimeError(f"{child.program.name} was never started")
        child.last_exit = code = await child.process.wait()
        requested = child.stopping.is_set()
        unrequested = " without a stop request" if code == EXIT_DRAINED and not requested else ""
        self._report(f"{child.program.name}: {_exit_text(code)}{unrequested}")
        ran_long = time.monotonic() - began > self._policy.forgiven_after
        child.failures = 1 if ran_long else child.failures + 1
        return self._policy.after(code, failures=child.failures, stop_requested=requested)

    def _report_fatal_exit(self, child: _Child) -> None:
        message = f"{child.program.name} stopped for good (exit code 70): {child.why()}"
        self._report(message)
        if self._fatal_exit is not None and not self._fatal_exit.done():
            self._fatal_exit.set_result(message)

    async def _until_ready(self, child: _Child) -> None:
        while not await is_ready(HOST, child.health_port):
            if child.monitor is not None and child.monitor.done():
                name, code = child.program.name, child.last_exit
                raise FatalError(f"{name} ended with {code} before it was ready: {child.why()}")
            await asyncio.sleep(PROBE_SECONDS)


def error_of(line: str) -> str | None:
    """What a line of a service's log reports as an error; None: it reports none."""
    if line.startswith(REFUSED):
        return line.removeprefix(REFUSED)
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("level") not in ("error", "critical"):
        return None
    return str(found.get("error") or found.get("event"))


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if number is signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


async def _done_within(task: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait([task], timeout=seconds)
    return bool(done)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set in time."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def service_program(service: str, env: Mapping[str, str]) -> Program:
    """The program of one of the five services. Raises ConfigurationError for another name."""
    if service not in DRAIN_ORDER:
        raise ConfigurationError(f"unknown service {service!r}: known are {', '.join(DRAIN_ORDER)}")
    return Program(service, "rollmill_" + service.replace("-", "_"), env)


async def is_ready(host: str, port: int) -> bool:
    """Whether ``/ready`` answers 200; anything else, no answer included, is False."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return b" 200 " in await _status_line(host, port)
    except (OSError, TimeoutError, ValueError):
        return False


async def _status_line(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
