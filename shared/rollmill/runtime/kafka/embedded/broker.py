"""One Apache Kafka node as a child process: start, stop, kill, start again with the same data and address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmill.errors import FatalError
from rollmill.runtime.kafka.embedded import guard
from rollmill.runtime.kafka.embedded.artifacts import class_path
from rollmill.runtime.kafka.embedded.config import BrokerConfig
from rollmill.runtime.kafka.embedded.java import find_java
from rollmill.runtime.kafka.embedded.ports import Ports, choose_ports
from rollmill.runtime.kafka.embedded.readiness import wait_until_ready
from rollmill.runtime.kafka.embedded.storage import DataDirectory, format_storage, hold
from rollmill.runtime.kafka.embedded.tools import ToolSettings

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
KILLED_GONE_SECONDS = 10.0


class EmbeddedKafka:
    """Apache Kafka on loopback, with its data under one directory.

    The broker ends with this process, however that ends. All methods may be called from any event loop, one at a time.
    """

    def __init__(
        self, data_directory: Path, config: BrokerConfig | None = None, *, tools: ToolSettings | None = None
    ) -> None:
        self.directory = DataDirectory(data_directory.resolve())
        self.config = config or BrokerConfig()
        self._tools = tools or ToolSettings()
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Ports | None = None

    @property
    def bootstrap_servers(self) -> str:
        """Address for clients; the same after every restart unless something else took the port meanwhile."""
        if self._ports is None:
            raise FatalError("The embedded broker has no address before its first start.")
        return f"{HOST}:{self._ports.broker}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start, and return when clients can produce, consume and begin transactions. Nothing to do if it runs.

        Raises ConfigurationError where Java, the jars, the port or the data directory are not to be had, FatalError
        where the broker does not come up.
        """
        if self.is_running:
            return
        began = time.monotonic()
        lock = await hold(self.directory, self.config.lock_seconds)
        try:
            await self._launch(lock)
        finally:
            os.close(lock)  # the broker has its own copy
        await self._ready_or_dead()
        log.info("Apache Kafka is ready at %s after %.1f s", self.bootstrap_servers, time.monotonic() - began)

    async def stop(self) -> None:
        """End cleanly, so that the next start needs no recovery; after ``stop_seconds`` SIGKILL."""
        await self._end(signal.SIGTERM, self.config.stop_seconds)

    async def kill(self) -> None:
        """End as a power cut would, for tests of what clients do then. ``start`` brings it back on the same port."""
        await self._end(signal.SIGKILL, KILLED_GONE_SECONDS)

    async def restart(self) -> None:
        """Stop cleanly and start again."""
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _launch(self, lock: int) -> None:
        java = await asyncio.to_thread(self._java_command)
        self._ports = choose_ports(self.directory.ports, self.config.port)
        self.directory.write_configuration(self.config, self._ports)
        if not self.directory.is_formatted:
            await asyncio.to_thread(format_storage, self.directory, java, self.config.users)
        self._process = self._spawn(java, lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(self._process.pid).encode(), 0)

    def _java_command(self) -> tuple[str, ...]:
        jars = os.pathsep.join(map(str, class_path(self._tools)))
        logging_to = f"-Dlog4j2.configurationFile={self.directory.log4j_properties}"
        return (str(find_java(self._tools)), *self.config.java_options(), logging_to, "-cp", jars)

    def _spawn(self, java: tuple[str, ...], lock: int) -> subprocess.Popen[bytes]:
        guarded = (sys.executable, "-I", "-S", guard.__file__, str(self.config.stop_seconds), str(lock))
        with self.directory.console.open("wb") as console:
            return subprocess.Popen(  # noqa: S603 - our own command
                (*guarded, *java, "kafka.Kafka", str(self.directory.server_properties)),
                stdin=subprocess.PIPE,  # open as long as this process runs; see guard
                stdout=console,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                start_new_session=True,
            )

    async def _ready_or_dead(self) -> None:
        ready = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.start_seconds):
                    ready = await wait_until_ready(HOST, self._port, alive=lambda: self.is_running)
        finally:
            if not ready:
                await self.kill()
        if not ready:
            raise FatalError(
                f"Apache Kafka did not come up within {self.config.start_seconds:g} s; the end of its logs in "
                f"{self.directory.root}:\n{self.directory.log_tail()}"
            )

    @property
    def _port(self) -> int:
        return int(self.bootstrap_servers.rpartition(":")[2])

    async def _end(self, number: signal.Signals, patience: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        await asyncio.to_thread(_end_process, process, number, patience)
        # The guard has ended; Java, its child, has ended once the lock of the directory is free.
        os.close(await hold(self.directory, KILLED_GONE_SECONDS))


def _end_process(process: subprocess.Popen[bytes], number: signal.Signals, patience: float) -> None:
    try:
        if number == signal.SIGKILL:
            _kill_group(process)
        else:
            process.send_signal(number)
        process.wait(patience)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Guard and Java at once: Java alone would be reported as a failure, the guard alone would let it finish."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
