"""Brings faults on, holds them, lifts them. What must follow by the rules is checked on the spot."""

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
from chaos.clock import CLOCK_FILE, put
from chaos.schedule import Fault, Kind
from chaos.stack import CLIENTS, Stack, ended
from rollmill.errors import EXIT_DRAINED, EXIT_FENCED
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.topics import BUILT

EXIT_SECONDS = 30.0
REACHED_SECONDS = 25.0
REFUSED_BYTES = 300
"""No record of ``built`` is so small."""


@dataclass
class Injector:
    """Injects into one stack; ``violations`` are rules that did not hold."""

    stack: Stack
    violations: list[str] = field(default_factory=list)
    unreached: int = 0
    """Failpoints that were armed and never passed."""

    async def inject(self, fault: Fault) -> tuple[str, ...]:
        """Bring it on, hold it, lift it. Returns who has to recover now."""
        ways: dict[Kind, Callable[[Fault], AbstractAsyncContextManager[None]]] = {
            Kind.KILL: self._kill,
            Kind.FAILPOINT: self._failpoint,
            Kind.DRAIN: self._drain,
            Kind.TWINS: self._twins,
            Kind.PAUSE: self._pause,
            Kind.ZOMBIE: self._zombie,
            Kind.BROKER_STOP: self._broker,
            Kind.BROKER_KILL: self._broker,
            Kind.CUT: self._network,
            Kind.DELAY: self._network,
            Kind.SWALLOW: self._network,
            Kind.REFUSAL: self._refusal,
            Kind.CLOCK: self._clock,
            Kind.DISK_FULL: self._disk_full,
        }
        async with ways[fault.kind](fault):
            await asyncio.sleep(fault.hold)
        return (fault.target,) if fault.target else CLIENTS

    @asynccontextmanager
    async def _kill(self, fault: Fault) -> AsyncIterator[None]:
        self.stack.supervisor.kill(fault.target)
        yield

    @asynccontextmanager
    async def _failpoint(self, fault: Fault) -> AsyncIterator[None]:
        """The next process of the service has it armed; it is killed to make room, and then dies there itself."""
        name, chronicle = fault.target, self.stack.chronicle
        armed = failpoints_file(self.stack.directory, name)
        armed.write_text(f"{fault.place}=kill@{fault.passes}")
        place = len(chronicle)
        self.stack.supervisor.kill(name)
        await chronicle.says(f"{name}: started", EXIT_SECONDS, since=place)
        place = len(chronicle)
        if not await chronicle.says(f"{name}: ended by SIGKILL", REACHED_SECONDS, since=place):
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
        """The second one fences the first, which comes back after its pause and fences the second."""
        name, place = fault.target, len(self.stack.chronicle)
        twin = await self.stack.twin(name)
        try:
            yield
            await asyncio.gather(self._must_be_fenced(fault, place), self._twin_must_be_fenced(fault, twin))
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
        """A successor takes over while the process stands still; it must not come back (rule T4)."""
        place, pid = len(self.stack.chronicle), self.stack.supervisor.pid(fault.target)
        _signal(pid, signal.SIGSTOP)
        twin = await self.stack.twin(fault.target)
        try:
            yield
            _signal(pid, signal.SIGCONT)
            await asyncio.gather(self._must_be_fenced(fault, place), self._twin_must_be_fenced(fault, twin))
        finally:
            _signal(pid, signal.SIGCONT)
            await _end(twin)

    async def _must_be_fenced(self, fault: Fault, place: int) -> None:
        words = f"{fault.target}: exit code {EXIT_FENCED}"
        if not await self.stack.chronicle.says(words, EXIT_SECONDS, since=place):
            self.violations.append(f"{fault}: the first one goes on")

    async def _twin_must_be_fenced(self, fault: Fault, twin: asyncio.subprocess.Process) -> None:
        """By the first one, when that is back."""
        code = await ended(twin, EXIT_SECONDS)
        if code != EXIT_FENCED:
            self.violations.append(f"{fault}: the second one ended with {code}")

    @asynccontextmanager
    async def _broker(self, fault: Fault) -> AsyncIterator[None]:
        broker = self.stack.broker
        await (broker.kill() if fault.kind is Kind.BROKER_KILL else broker.stop())
        try:
            yield
        finally:
            await broker.start()

    @asynccontextmanager
    async def _network(self, fault: Fault) -> AsyncIterator[None]:
        proxy = self.stack.proxies[fault.target]
        if fault.kind is Kind.CUT:
            proxy.cut()
        elif fault.kind is Kind.SWALLOW:
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
        put(self.stack.directory / CLOCK_FILE, fault.amount)
        try:
            yield
        finally:
            put(self.stack.directory / CLOCK_FILE, 0.0)

    @asynccontextmanager
    async def _disk_full(self, fault: Fault) -> AsyncIterator[None]:  # noqa: ARG002  # all are alike
        """Nothing can be written where the broker's data lie; it gives up, and is started when there is room."""
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
