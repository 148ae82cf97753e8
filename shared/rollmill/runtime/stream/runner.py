"""All tasks of one process, side by side. One with too many bad records stops alone, any other failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import structlog
from aiokafka.errors import KafkaError

from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.stream.dead_letters import DeadLetterLimitError
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.task import Task
from rollmill.runtime.stream.task_identity import TaskIdentity, own_tasks
from rollmill.runtime.stream.task_tools import TaskTools

log = structlog.get_logger(__name__)

DECISION_SECONDS = 2.0
"""Between two looks for an operator's decision about a stopped task."""


async def run_stages(stages: Iterable[Processor[Any, Any]], tools: TaskTools, stop: asyncio.Event) -> None:
    """Run every task of ``stages`` that is this process's (rule T1), until ``stop``.

    Raises the FencedError or FatalError of the first task that cannot go on; the others drain first. Over its limit of
    dead letters a task stops, the process is not ready any more, and the other partitions go on; the task goes on when
    an operator has decided (`rollmill tasks`). Where it is the last one, or at the end, its error is raised.
    """
    tasks = [(stage, identity) for stage in stages for identity in own_tasks(stage, tools.settings)]
    if not tasks:
        return  # a service without stages: its workers decide when it ends
    crew = _Crew(tools, stop, len(tasks))
    running = {asyncio.create_task(without_client_cancellation(crew.run(*task)), name=_name(task)) for task in tasks}
    try:
        failure = await _first_failure(running)
    finally:
        stop.set()
    await asyncio.gather(*running, return_exceptions=True)
    if failure is not None:
        raise failure


async def _first_failure(pending: set[asyncio.Task[None]]) -> BaseException | None:
    """The error that ends the process, or that of the first task that stayed stopped; None: all have drained."""
    stopped: BaseException | None = None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            error = asyncio.CancelledError() if job.cancelled() else job.exception()
            if error is not None and not isinstance(error, DeadLetterLimitError):
                return error
            stopped = stopped or error
    return stopped


def _name(task: tuple[Processor[Any, Any], TaskIdentity]) -> str:
    return f"{task[1].stage}.{task[1].number}"


class _Crew:
    """The tasks of a process: how many of them are at work, and what becomes of one that stops."""

    def __init__(self, tools: TaskTools, stop: asyncio.Event, at_work: int) -> None:
        self._tools, self._stop, self._at_work = tools, stop, at_work
        self._all_stopped = asyncio.Event()

    async def run(self, stage: Processor[Any, Any], identity: TaskIdentity) -> None:
        """Run a task, again after each decision about a record that stopped it."""
        while True:
            task = Task(stage, identity, self._tools)
            try:
                return await task.run(self._stop)
            except DeadLetterLimitError as error:
                await self._decision(task, error)

    async def _decision(self, task: Task[Any], error: DeadLetterLimitError) -> None:
        """Return when an operator has decided. Raises ``error`` where the process ends before that."""
        self._at_work -= 1
        if self._at_work == 0 or self._stop.is_set():
            self._all_stopped.set()
            raise error
        self._tools.metrics.count("tasks_stopped", task=task.name)
        log.error("a task has stopped, the other partitions go on", task=task.name, error=str(error))
        while not await self._is_decided(task):
            if await self._ends():
                raise error
        self._at_work += 1
        log.info("the task goes on, as it was decided", task=task.name)

    async def _is_decided(self, task: Task[Any]) -> bool:
        with suppress(KafkaError, OSError, TimeoutError):  # asked again
            return await task.is_decided()
        return False

    async def _ends(self) -> bool:
        """Whether the process ends; otherwise after a pause."""
        waiting = [asyncio.create_task(event.wait()) for event in (self._stop, self._all_stopped)]
        done, pending = await asyncio.wait(waiting, timeout=DECISION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for job in pending:
            job.cancel()
        return bool(done)
