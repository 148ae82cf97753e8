"""What lies between a process and the broker: time, cuts, lost requests and answers, and the process's own death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn, TypeVar

from aiokafka.errors import KafkaError, RequestTimedOutError

T = TypeVar("T")

LATE_SECONDS = 30.0


class Fault(StrEnum):
    """What happens to one call."""

    REQUEST_LOST = "request lost"
    """Nothing is done, and the caller is told that it failed."""
    ANSWER_LOST = "answer lost"
    """It is done, and the caller is told that it failed."""
    SILENT = "silent"
    """Nothing is done, and the caller waits."""
    LATE = "late"
    """The caller waits, and it is done half a minute later."""
    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"


class ProcessKilledError(BaseException):
    """Raised in a process that is dead, wherever it would go on; no handler of its own stops it."""


class NetworkLink:
    """One process's way to the broker. ``seconds``: of one call. ``armed``: the fault of the next call by its name.

    Names are ``start``, ``send``, ``offsets``, ``commit``, ``abort``, ``fetch``, and ``look`` for all else that reads.
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self._seconds = seconds
        self._passing = asyncio.Event()
        self._passing.set()
        self.armed: dict[str, Fault] = {}
        self.dead = False

    def cut(self) -> None:
        """Nothing passes until `mend`."""
        self._passing.clear()

    def mend(self) -> None:
        self._passing.set()

    def kill(self) -> None:
        """The process does nothing more."""
        self.dead = True
        self.mend()

    async def call(self, name: str, effect: Callable[[], T]) -> T:
        """``effect`` at the broker, there and back. Raises what it raises, RequestTimedOutError, ProcessKilledError."""
        await self._passes()
        fault = self.armed.pop(name, None)
        if fault in (Fault.KILLED_BEFORE, Fault.REQUEST_LOST):
            self._fail(fault)
        if fault in (Fault.SILENT, Fault.LATE):
            await self._never(effect, fault)
        found = effect()
        if fault is not None:
            self._fail(fault)
        await self._passes()
        return found

    async def _passes(self) -> None:
        await asyncio.sleep(self._seconds / 2)
        await self._passing.wait()
        if self.dead:
            raise ProcessKilledError

    def _fail(self, fault: Fault | None) -> NoReturn:
        if fault in (Fault.KILLED_BEFORE, Fault.KILLED_AFTER):
            self.kill()
            raise ProcessKilledError
        raise RequestTimedOutError

    async def _never(self, effect: Callable[[], T], fault: Fault | None) -> NoReturn:
        if fault is Fault.LATE:
            asyncio.get_running_loop().call_later(LATE_SECONDS, _at_last, effect)
        while True:
            await asyncio.sleep(LATE_SECONDS)
            if self.dead:
                raise ProcessKilledError


def _at_last(effect: Callable[[], object]) -> None:
    with suppress(KafkaError):  # nobody hears of it
        effect()
