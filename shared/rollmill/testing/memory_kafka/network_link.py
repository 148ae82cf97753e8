"""The network between one process and the broker: latency, cuts, lost requests and answers, kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn, TypeVar

from aiokafka.errors import KafkaError, RequestTimedOutError

T = TypeVar("T")

LATE_SECONDS = 30.0


class LinkFault(StrEnum):
    """What happens to one call."""

    REQUEST_LOST = "request lost"
    """The broker does nothing, and the call fails."""
    ANSWER_LOST = "answer lost"
    """The broker does it, and the call fails."""
    SILENT = "silent"
    """The broker does nothing, and the caller waits."""
    LATE = "late"
    """The caller waits, and the broker does it `LATE_SECONDS` later."""
    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"


class ProcessKilledError(BaseException):
    """Raised in a killed process wherever it would continue; no ``except Exception`` catches it."""


class NetworkLink:
    """One process's connection to the broker. ``seconds``: of one call. ``armed``: by name, the fault of the next call.

    Names are ``start``, ``send``, ``offsets``, ``commit``, ``abort``, ``fetch``, and ``look`` for all other reads.
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self._seconds = seconds
        self._connected = asyncio.Event()
        self._connected.set()
        self.armed: dict[str, LinkFault] = {}
        self.killed = False

    def cut(self) -> None:
        """All calls wait until `mend`."""
        self._connected.clear()

    def mend(self) -> None:
        self._connected.set()

    def kill(self) -> None:
        """Kill the process: every call raises ProcessKilledError from now on."""
        self.killed = True
        self.mend()

    async def call(self, name: str, effect: Callable[[], T]) -> T:
        """Run ``effect`` at the broker, with latency both ways.

        Raises RequestTimedOutError, ProcessKilledError, and what ``effect`` raises.
        """
        await self._transit()
        fault = self.armed.pop(name, None)
        if fault in (LinkFault.KILLED_BEFORE, LinkFault.REQUEST_LOST):
            self._fail(fault)
        if fault in (LinkFault.SILENT, LinkFault.LATE):
            await self._hang(effect, fault)
        found = effect()
        if fault is not None:
            self._fail(fault)
        await self._transit()
        return found

    async def _transit(self) -> None:
        await asyncio.sleep(self._seconds / 2)
        await self._connected.wait()
        if self.killed:
            raise ProcessKilledError

    def _fail(self, fault: LinkFault | None) -> NoReturn:
        if fault in (LinkFault.KILLED_BEFORE, LinkFault.KILLED_AFTER):
            self.kill()
            raise ProcessKilledError
        raise RequestTimedOutError

    async def _hang(self, effect: Callable[[], T], fault: LinkFault | None) -> NoReturn:
        if fault is LinkFault.LATE:
            asyncio.get_running_loop().call_later(LATE_SECONDS, _run_late, effect)
        while True:
            await asyncio.sleep(LATE_SECONDS)
            if self.killed:
                raise ProcessKilledError


def _run_late(effect: Callable[[], object]) -> None:
    with suppress(KafkaError):  # the caller has given up
        effect()
