"""Cancellations that nobody asked for.

aiokafka ends tasks and futures of its own by cancelling them and lets the CancelledError out to whoever awaits them,
e.g. out of ``producer.stop()`` when the broker is away. Taken for a wish to stop, it would end a task in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rollmill.errors import RetryableError

T = TypeVar("T")


def is_stray() -> bool:
    """Whether a CancelledError that is on its way here is a client's own: nobody cancelled the current task."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def without_strays(work: Awaitable[T]) -> T:
    """The result of ``work``. Raises RetryableError in place of a stray cancellation."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if not is_stray():
            raise
        raise RetryableError("a Kafka client cancelled a call that it was asked for") from error
