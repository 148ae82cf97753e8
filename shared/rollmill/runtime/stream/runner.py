"""All tasks of one process, side by side; the first that fails takes the process down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.task import Task, TaskTools
from rollmill.runtime.stream.task_identity import own_tasks


async def run_stages(stages: Iterable[Processor[Any, Any]], tools: TaskTools, stop: asyncio.Event) -> None:
    """Run every task of ``stages`` that is this process's (rule T1), until ``stop``.

    Raises the FencedError or FatalError of the first task that cannot go on; the others drain first.
    """
    tasks = [Task(stage, identity, tools) for stage in stages for identity in own_tasks(stage, tools.settings)]
    running = [asyncio.create_task(without_client_cancellation(task.run(stop)), name=task.name) for task in tasks]
    if not running:
        return
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        stop.set()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()
