"""Runs code that is not ours, so that nothing it raises ends more than the one job that it was called for.

``SystemExit``, ``KeyboardInterrupt`` and ``GeneratorExit`` are no ``Exception``: uncaught they end the process, with
the exit code that the strategy chose. `contained` turns them into a `ForeignExitError`, which every job's own handling
of errors catches. What comes from outside passes: a cancellation of the task, Ctrl-C. This is protection from
accidents; an imported module is trusted (`rollmill.strategies.allow_list` decides which may be imported).
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

from rollmill.errors import RollmillError

R = TypeVar("R")

_in_foreign_code: ContextVar[bool] = ContextVar("in_foreign_code", default=False)


class ForeignExitError(RollmillError):
    """Foreign code raised what would have ended the process; ``__cause__`` is what it raised."""


@contextmanager
def contained(*, awaiting: bool = False) -> Iterator[None]:
    """Every call of a strategy, scorer or decoder runs in this. Raises ForeignExitError, and what the code raises.

    ``awaiting``: the code awaits, so that its task can be cancelled, or its coroutine closed, meanwhile. Code that does
    not await gets neither from outside, whatever it raises.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _is_from_outside(error, awaiting=awaiting):
            raise
        raise ForeignExitError(describe(error)) from error


async def contained_await(foreign: Coroutine[Any, Any, R]) -> R:
    """What ``foreign`` returns; the tasks that it starts are contained, too.

    It gets a task of its own: a GeneratorExit of something that it awaits is thrown into every coroutine of the task.
    """
    _contain_child_tasks(asyncio.get_running_loop())
    token = _in_foreign_code.set(True)
    try:
        task = asyncio.create_task(foreign)
    finally:
        _in_foreign_code.reset(token)
    return await task


def describe(error: BaseException) -> str:
    """Type and text of an error of foreign code; its ``__str__`` may raise, too."""
    try:
        with contained():
            return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # the text is foreign code, too
        return f"{type(error).__name__}: its text cannot be shown"


def _is_from_outside(error: BaseException, *, awaiting: bool) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread() and _interrupts_raise()
    if not awaiting:
        return False
    task = _current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit) and task is None  # closed at the end of its loop


def _interrupts_raise() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt: in a service, which handles SIGINT itself, it never does."""
    handler: Any = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, partial)  # a partial: asyncio.Runner's


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _contain_child_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """A task in which SystemExit is raised ends the loop, whoever awaits it: asyncio raises it there as well."""
    if loop.get_task_factory() is not _new_task:
        loop.set_task_factory(_new_task)


def _new_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R] | Generator[Any, None, R], **options: Any
) -> asyncio.Task[R]:
    if not _in_foreign_code.get():
        return asyncio.Task(cast("Coroutine[Any, Any, R]", coroutine), loop=loop, **options)
    task = asyncio.Task(_contained_task(cast("Awaitable[R]", coroutine)), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # a task that is cancelled before it began never awaits it
    return task


async def _contained_task(coroutine: Awaitable[R]) -> R:
    with contained(awaiting=True):
        return await coroutine
