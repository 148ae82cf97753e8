"""The engine's heart: gathers waiting calls into micro-batches and samples each with one version of the weights."""

import asyncio
import random
from asyncio import AbstractEventLoop, Future
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from relay.model import RelayModel, from_bytes
from relay.sampler import Draw, Reply, generator, sample


@dataclass(frozen=True)
class Policy:
    """Weights and their version, swapped as one."""

    model: RelayModel
    version: int


@dataclass(frozen=True)
class Sampled:
    version: int
    replies: tuple[Reply, ...]


@dataclass(frozen=True)
class _Call:
    draws: tuple[Draw, ...]
    answer: Future[Sampled]


class Engine:
    """Use as an async context manager: sampling runs between entering and leaving.

    Calls that arrive within `window` seconds of each other share a micro-batch. One worker thread samples, so the
    event loop stays free; new weights take effect at the next micro-batch, so each call is sampled by one version.
    """

    def __init__(self, model: RelayModel, *, version: int = 0, seed: int = 0, window: float = 0.001) -> None:
        self._policy = Policy(model, version)
        self._window = window
        self._random = generator("engine", seed)
        self._waiting: asyncio.Queue[_Call] = asyncio.Queue()
        self._swapped = asyncio.Condition()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving
        self._worker.shutdown()

    @property
    def version(self) -> int:
        return self._policy.version

    def rng(self, seed: int | None, index: int) -> random.Random:
        """The source of randomness of choice `index` of a call: its own where the call has a seed."""
        return self._random if seed is None else generator("call", seed, index)

    async def sample(self, draws: Sequence[Draw]) -> Sampled:
        """One reply per draw, all by the same version."""
        call = _Call(tuple(draws), self._loop.create_future())
        self._waiting.put_nowait(call)
        return await call.answer

    async def load(self, weights: bytes, version: int) -> None:
        """Swaps the weights; raises `WeightsError` and changes nothing where the bytes are no weights."""
        model = await self._loop.run_in_executor(self._worker, from_bytes, weights)
        async with self._swapped:
            self._policy = Policy(model, version)
            self._swapped.notify_all()

    async def wait_for_version(self, at_least: int, seconds: float) -> int:
        """Returns the version as soon as it is `at_least`, or whatever it is when the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._swapped:
                await self._swapped.wait_for(lambda: self.version >= at_least)
        return self.version

    @property
    def _loop(self) -> AbstractEventLoop:
        return asyncio.get_running_loop()

    async def _serve(self) -> None:
        while True:
            calls = [await self._waiting.get()]
            await asyncio.sleep(self._window)
            while not self._waiting.empty():
                calls.append(self._waiting.get_nowait())
            await self._answer(calls)

    async def _answer(self, calls: Sequence[_Call]) -> None:
        policy = self._policy
        draws = [draw for call in calls for draw in call.draws]
        sampling = self._loop.run_in_executor(self._worker, sample, policy.model, draws)
        await asyncio.wait([sampling])
        replies = iter(() if sampling.exception() else sampling.result())
        for call in calls:
            own = tuple(islice(replies, len(call.draws)))
            if call.answer.done():  # its client has left
                continue
            if error := sampling.exception():
                call.answer.set_exception(error)
            else:
                call.answer.set_result(Sampled(policy.version, own))
