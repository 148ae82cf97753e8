"""All tasks of one process, side by side. One with too many bad records stops alone, any other failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.stream.dead_letters import DeadLetterLimitError
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.task import Task, TaskTools
from rollmill.runtime.stream.task_identity import own_tasks

log = structlog.get_logger(__name__)


async def run_stages(stages: Iterable[Processor[Any, Any]], tools: TaskTools, stop: asyncio.Event) -> None:
    """Run every task of ``stages`` that is this process's (rule T1), until ``stop``.

    Raises the FencedError or FatalError of the first task that cannot go on; the others drain first. Over its limit of
    dead letters a task stops, the process is not ready any more, and the other partitions go on; the error is raised at
    the end.
    """
    tasks = [Task(stage, identity, tools) for stage in stages for identity in own_tasks(stage, tools.settings)]
    if not tasks:
        return  # a service without stages: its workers decide when it ends
    running = {
        asyncio.create_task(without_client_cancellation(task.run(stop)), name=task.name): task.name for task in tasks
    }
    try:
        failure = await _first_failure(running, tools, stop)
    finally:
        stop.set()
    await asyncio.gather(*running, return_exceptions=True)
    if failure is not None:
        raise failure


async def _first_failure(
    running: Mapping[asyncio.Task[None], str], tools: TaskTools, stop: asyncio.Event
) -> BaseException | None:
    """The error that ends the process, or the first of the tasks that were left behind; None: all have drained."""
    left_behind: BaseException | None = None
    pending = set(running)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            error = asyncio.CancelledError() if job.cancelled() else job.exception()
            if error is not None and not isinstance(error, DeadLetterLimitError):
                return error
            left_behind = left_behind or error
            if error is not None and pending and not stop.is_set():
                tools.metrics.count("tasks_stopped", task=running[job])
                log.error("a task has stopped, the other partitions go on", task=running[job], error=str(error))
    return left_behind
