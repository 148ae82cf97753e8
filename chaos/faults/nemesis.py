"""Injects faults, holds them and lifts them. What the rules require of the processes meanwhile is checked at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from chaos.child import failpoints_file
from chaos.clock import CLOCK_FILE, shift
from chaos.faults.fault_plan import Fault, FaultKind
from chaos.stack import CLIENTS, Stack, exit_code_within
from rollmill.errors import EXIT_DRAINED, EXIT_FENCED
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.topics import BUILT

EXIT_SECONDS = 30.0
REACHED_SECONDS = 25.0
REFUSED_BYTES = 300
"""Every record of ``built`` is larger."""


@dataclass
class Nemesis:
    """Injects faults into one stack; ``violations``: rules that did not hold."""

    stack: Stack
    violations: list[str] = field(default_factory=list)
    unreached: int = 0
    """Failpoints that were armed and never reached."""

    async def inject(self, fault: Fault) -> tuple[str, ...]:
        """Inject the fault, hold it, lift it. Returns the clients that have to recover now."""
        injections: dict[FaultKind, Callable[[Fault], AbstractAsyncContextManager[None]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.FAILPOINT: self._failpoint,
            FaultKind.DRAIN: self._drain,
            FaultKind.TWINS: self._twins,
            FaultKind.PAUSE: self._pause,
            FaultKind.ZOMBIE: self._zombie,
            FaultKind.BROKER_STOP: self._broker,
            FaultKind.BROKER_KILL: self._broker,
            FaultKind.CUT: self._network,
            FaultKind.DELAY: self._network,
            FaultKind.SWALLOW: self._network,
            FaultKind.REFUSAL: self._refusal,
            FaultKind.CLOCK: self._clock,
            FaultKind.DISK_FULL: self._disk_full,
        }
        async with injections[fault.kind](fault):
            await asyncio.sleep(fault.hold)
        return (fault.target,) if fault.target else CLIENTS

    @asynccontextmanager
    async def _kill(self, fault: Fault) -> AsyncIterator[None]:
        self.stack.supervisor.kill(fault.target)
        yield

    @asynccontextmanager
    async def _failpoint(self, fault: Fault) -> AsyncIterator[None]:
        """Kill the service, so that its next process starts with the failpoint armed and is killed there."""
        name, log = fault.target, self.stack.supervisor_log
        file = failpoints_file(self.stack.directory, name)
        file.write_text(f"{fault.failpoint}=kill@{fault.passes}")
        line = len(log)
        self.stack.supervisor.kill(name)
        await log.wait_for(f"{name}: started", EXIT_SECONDS, since=line)
        line = len(log)
        if not await log.wait_for(f"{name}: ended by SIGKILL", REACHED_SECONDS, since=line):
            self.unreached += 1
            self.stack.supervisor.kill(name)
        yield

    @asynccontextmanager
    async def _drain(self, fault: Fault) -> AsyncIterator[None]:
        code = await self.stack.supervisor.stop(fault.target, EXIT_SECONDS)
        if code != EXIT_DRAINED:
            self.violations.append(f"{fault}: drained with exit code {code}")
        yield
        await self.stack.supervisor.start(self.stack.programs[fault.target])

    @asynccontextmanager
    async def _twins(self, fault: Fault) -> AsyncIterator[None]:
        """The second process fences the first, which restarts after its pause and fences the second."""
        name, line = fault.target, len(self.stack.supervisor_log)
        twin = await self.stack.twin(name)
        try:
            yield
            await asyncio.gather(self._must_be_fenced(fault, line), self._twin_must_be_fenced(fault, twin))
        finally:
            await _end(twin)

    @asynccontextmanager
    async def _pause(self, fault: Fault) -> AsyncIterator[None]:
        pid = self.stack.supervisor.pid(fault.target)
        _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pid, signal.SIGCONT)

    @asynccontextmanager
    async def _zombie(self, fault: Fault) -> AsyncIterator[None]:
        """A second process takes over while the first is stopped; the first must not continue (rule T4)."""
        line, pid = len(self.stack.supervisor_log), self.stack.supervisor.pid(fault.target)
        _signal(pid, signal.SIGSTOP)
        twin = await self.stack.twin(fault.target)
        try:
            yield
            _signal(pid, signal.SIGCONT)
            await asyncio.gather(self._must_be_fenced(fault, line), self._twin_must_be_fenced(fault, twin))
        finally:
            _signal(pid, signal.SIGCONT)
            await _end(twin)

    async def _must_be_fenced(self, fault: Fault, line: int) -> None:
        message = f"{fault.target}: exit code {EXIT_FENCED}"
        if not await self.stack.supervisor_log.wait_for(message, EXIT_SECONDS, since=line):
            self.violations.append(f"{fault}: the first process continues")

    async def _twin_must_be_fenced(self, fault: Fault, twin: asyncio.subprocess.Process) -> None:
        """By the first process, once that has restarted."""
        code = await exit_code_within(twin, EXIT_SECONDS)
        if code != EXIT_FENCED:
            self.violations.append(f"{fault}: the second process ended with {code}")

    @asynccontextmanager
    async def _broker(self, fault: Fault) -> AsyncIterator[None]:
        broker = self.stack.broker
        await (broker.kill() if fault.kind is FaultKind.BROKER_KILL else broker.stop())
        try:
            yield
        finally:
            await broker.start()

    @asynccontextmanager
    async def _network(self, fault: Fault) -> AsyncIterator[None]:
        proxy = self.stack.proxies[fault.target]
        if fault.kind is FaultKind.CUT:
            proxy.cut()
        elif fault.kind is FaultKind.SWALLOW:
            proxy.swallow()
        else:
            proxy.delay(fault.amount)
        try:
            yield
        finally:
            proxy.mend()

    @asynccontextmanager
    async def _refusal(self, fault: Fault) -> AsyncIterator[None]:  # noqa: ARG002  # all are alike
        await self._set_limit(REFUSED_BYTES)
        try:
            yield
        finally:
            await self._set_limit(None)

    async def _set_limit(self, limit: int | None) -> None:
        settings = self.stack.settings
        config = {**BUILT.broker_config(), **({} if limit is None else {"max.message.bytes": str(limit)})}
        admin = KafkaClients(settings).admin()
        await admin.start()
        try:
            name = BUILT.full_name(settings.prefix)
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs=config)])
        finally:
            await admin.close()

    @asynccontextmanager
    async def _clock(self, fault: Fault) -> AsyncIterator[None]:
        shift(self.stack.directory / CLOCK_FILE, fault.amount)
        try:
            yield
        finally:
            shift(self.stack.directory / CLOCK_FILE, 0.0)

    @asynccontextmanager
    async def _disk_full(self, fault: Fault) -> AsyncIterator[None]:  # noqa: ARG002  # all are alike
        """Nothing can be written to the broker's disk; the broker fails, and is restarted when there is space again."""
        ballast = self.stack.broker.directory.root / "ballast"
        await asyncio.to_thread(_fill, ballast)
        try:
            yield
        finally:
            ballast.unlink()
            await self.stack.broker.kill()
            await self.stack.broker.start()


def _fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
