"""Groups one after the other, and a tool that is slow on purpose, told by the engine's version."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import httpx

from relay.agents import Crew, Tool, quick_tool
from relay.task import Message, question

SLOW_EVERY: Final = 7
_POLL_SECONDS: Final = 2.0


@dataclass(frozen=True)
class EngineVersions:
    """Asks the engine for its version. `http` has the engine's address as its base URL."""

    http: httpx.AsyncClient

    async def current(self) -> int:
        return await self._ask(at_least=0, seconds=0)

    async def reached(self, at_least: int) -> int:
        """Returns once the engine's version is `at_least`, by long polls."""
        while (version := await self._ask(at_least, _POLL_SECONDS)) < at_least:
            pass
        return version

    async def _ask(self, at_least: int, seconds: float) -> int:
        params = {"at_least": at_least, "timeout": seconds}
        answer = await self.http.get("/admin/version", params=params, timeout=seconds + 10)
        return int(answer.raise_for_status().json()["version"])


async def unless_stopped(work: Coroutine[Any, Any, object], stop: asyncio.Event) -> bool:
    """Awaits `work` or the stop, whichever is first; True where the work was done. Raises what the work raises."""
    tasks = (asyncio.ensure_future(work), asyncio.create_task(stop.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.wait(tasks)
    return not tasks[0].cancelled() and _raising(tasks[0])


def _raising(done: asyncio.Future[object]) -> bool:
    """True, or the error that the work ended with."""
    done.result()
    return True


@dataclass(frozen=True)
class SlowTool:
    """Holds the second turn back until the first turn's version is too old to be trained, or until the stop."""

    versions: EngineVersions
    max_staleness: int
    stop: asyncio.Event

    def for_one_session(self) -> Tool:
        started: list[int] = []

        async def tool(turn: int, digit: str) -> Message:
            if turn == 0:
                started.append(await self.versions.current())
            if turn == 1:
                await unless_stopped(self.versions.reached(started[0] + self.max_staleness + 1), self.stop)
            return question(turn, digit)

        return tool


def is_slow(group: int) -> bool:
    """Every seventh group has a slow member."""
    return group % SLOW_EVERY == SLOW_EVERY - 1


def tools(slow: SlowTool) -> Callable[[int, int], Tool]:
    """For `Crew.tool_of`: the first member of every seventh group is slow on purpose."""
    return lambda group, member: slow.for_one_session() if is_slow(group) and member == 0 else quick_tool


async def run_groups(crew: Crew, admit: Callable[[int], Coroutine[Any, Any, None]], stop: asyncio.Event) -> int:
    """Starts groups 0, 1, 2, … as `admit` lets them until the stop, then waits for those that run; their number."""
    group = 0
    async with asyncio.TaskGroup() as running:
        while await unless_stopped(admit(group), stop) and not stop.is_set():
            running.create_task(crew.run_group(group))
            group += 1
    return group
