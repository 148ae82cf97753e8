"""A thread with its own event loop, so that the API is synchronous and safe under Ray and torchrun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollmill.errors import FatalError

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for callers in other threads. Starts at the first `call`; `close` ends it for good."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.closed = False

    @property
    def running(self) -> bool:
        return self._loop is not None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. When the wait is interrupted, so is the work. Raises FatalError once closed."""
        if self.closed:
            work.close()
            raise FatalError(f"{self._name} is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, action: Callable[[], object]) -> None:
        """Run ``action`` on the loop without waiting for it; at once where the loop does not run."""
        if self._loop is None:
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        """Cancel what runs, end the thread. A second call does nothing."""
        self.closed = True
        loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
