"""Cancellations that come from a Kafka client and not from whoever runs a task.

aiokafka ends tasks and futures of its own by cancelling them and lets the CancelledError out to whoever awaits them,
e.g. out of ``producer.stop()`` when the broker cannot be reached. Taken for a request to stop, it would end a task
without a trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rollmill.errors import RetryableError

T = TypeVar("T")


def is_client_cancellation() -> bool:
    """Whether a CancelledError caught here is a client's own: no one has cancelled the current task."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def without_client_cancellation(work: Awaitable[T]) -> T:
    """The result of ``work``. Raises RetryableError in place of a client's own cancellation."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if not is_client_cancellation():
            raise
        raise RetryableError("a Kafka client cancelled a call by itself") from error
