"""Clients that try again: one idempotency key of one session is one call upstream (bug class: retries that run twice).

While a call with the key runs, a second one waits for its reply; for a while after it has ended it is played again from
memory. A call that failed leaves nothing, and the next one with its key is the next attempt. One key for two questions
(by path and body) is a mistake of the client, and refused: it must not get the reply to another question. Keys are
known to this replica alone, as are the calls in flight: the ingress has session affinity (rule S3).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_capture.apis.history_cache import compact_copy
from rollmill_capture.errors import ApiError
from rollmill_capture.proxy.response_stream import SETTLED

KEY = b"idempotency-key"
ATTEMPT = b"x-rollmill-attempt"
"""Header by which the call inside learns its number; what a client says there is dropped."""
KEY_LENGTH = 256
UNPROCESSABLE = 422
MOST_KEYS = 100_000
"""Keys that are remembered, for a reply or for the number of attempts."""


@dataclass
class _Turn:
    """What is known of one key."""

    attempts: int = 0
    running: bool = False
    waiting: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call that runs has ended, or when somebody came to wait for it."""
    question: bytes = b""
    """Digest of the path and body of the call that ran last."""
    reply: list[Message] | None = None
    size: int = 0
    until: float = 0.0


class Idempotency:
    """``seconds``: how long replies are kept; ``room``: bytes of all of them; ``grace``: how long a call goes on that
    its client has left, for the client's next try.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        seconds: float = 600.0,
        room: int = 256 * 2**20,
        grace: float = 2.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._seconds = seconds
        self._room = room
        self._grace = grace
        self._now = now
        self._turns: dict[tuple[str, bytes], _Turn] = {}
        self._over: OrderedDict[tuple[str, bytes], _Turn] = OrderedDict()
        """Of them those that have ended, in that order: one that runs for long keeps none of them."""
        self._kept = 0

    def around(self, app: ASGIApp, session_of: Callable[[Scope], Awaitable[str | None]]) -> ASGIApp:
        """``app`` behind idempotency. ``session_of`` names what the keys of a request are unique in; None: let ``app``
        refuse it.
        """
        return _Fenced(self, app, session_of)

    async def enter(self, name: tuple[str, bytes], app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        turn = self._turns.setdefault(name, _Turn())
        await self._wait(turn)
        if turn.reply is not None and turn.until > self._now():
            await self._replay(turn, turn.reply, scope, receive, send)
            return
        await self._run(name, turn, app, scope, receive, send)

    async def _replay(self, turn: _Turn, reply: list[Message], scope: Scope, receive: Receive, send: Send) -> None:
        if await _question(scope, receive) != turn.question:
            words = "this idempotency-key was used for another request of the session; every call has a key of its own"
            await ApiError(UNPROCESSABLE, words).response()(scope, receive, send)
            return
        self._metrics.count("replayed_replies")
        for message in reply:
            await send(message)

    async def _wait(self, turn: _Turn) -> None:
        turn.waiting += 1
        turn.moved.set()
        try:
            while turn.running:
                turn.moved.clear()
                await turn.moved.wait()
        finally:
            turn.waiting -= 1

    async def _run(
        self, name: tuple[str, bytes], turn: _Turn, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._turns[name] = turn
        self._kept -= self._over.pop(name, _Turn()).size
        turn.attempts, turn.running, turn.size, tape = turn.attempts + 1, True, 0, list[Message]()

        async def taped(message: Message) -> None:
            tape.append(message)
            await send(message)

        inside, question = _numbered(scope, turn.attempts), _asked(scope)
        try:
            await app(inside, self._patient(turn, receive, question), taped)
        finally:
            turn.running, turn.question = False, question.digest()
            turn.moved.set()
            self._keep(name, turn, tape if inside.get(SETTLED) else None)

    def _patient(self, turn: _Turn, receive: Receive, question: hashlib.blake2b) -> Receive:
        """The client's leaving is told later: not while somebody waits for the reply, or may come to do so. What it
        asks goes into ``question`` as it is read.
        """

        async def patient() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._retried(turn)
            else:
                question.update(message.get("body", b""))
            return message

        return patient

    async def _retried(self, turn: _Turn) -> None:
        """Returns when nobody wants the reply any more."""
        deadline = self._now() + self._grace
        while turn.running and (turn.waiting or self._now() < deadline):
            turn.moved.clear()
            left = None if turn.waiting else max(deadline - self._now(), 0.001)
            await _moved(turn.moved.wait(), left)

    def _keep(self, name: tuple[str, bytes], turn: _Turn, tape: list[Message] | None) -> None:
        if tape is not None:
            turn.reply, turn.until = _spliced(tape), self._now() + self._seconds
            turn.size = sum(len(message.get("body", b"")) for message in turn.reply)
            self._kept += turn.size
        self._over[name] = turn
        self._forget()

    def _forget(self) -> None:
        """Drop what is too old, and the oldest where all together are too large or too many."""
        while self._over:
            name, turn = next(iter(self._over.items()))
            if not self._is_over(turn):
                return
            self._kept -= turn.size
            del self._over[name]
            if self._turns.get(name) is turn:
                del self._turns[name]

    def _is_over(self, turn: _Turn) -> bool:
        old = turn.reply is not None and turn.until <= self._now()
        return old or self._kept > self._room or len(self._over) > MOST_KEYS


@dataclass(frozen=True)
class _Fenced:
    """An ASGI application; no function, which a router would take for another kind of endpoint."""

    fence: Idempotency
    app: ASGIApp
    session_of: Callable[[Scope], Awaitable[str | None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _header(scope, KEY)
        session = None if key is None else await self.session_of(scope)
        if key is None or session is None:
            await self.app(_numbered(scope, None), receive, send)
        else:
            await self.fence.enter((session, key[:KEY_LENGTH]), self.app, scope, receive, send)


def _asked(scope: Scope) -> hashlib.blake2b:
    return hashlib.blake2b(str(scope["path"]).encode(), digest_size=16)


async def _question(scope: Scope, receive: Receive) -> bytes:
    """Digest of a request that is read to its end; of one whose client leaves, as far as it came."""
    question, more = _asked(scope), True
    while more:
        message = await receive()
        question.update(message.get("body", b""))
        more = message.get("more_body", False)
    return question.digest()


def _spliced(tape: list[Message]) -> list[Message]:
    """The same reply in two messages: a stream's many small ones would take several times the room of their bytes."""
    body = compact_copy(b"".join(message.get("body", b"") for message in tape))
    starts = [message for message in tape if message["type"] == "http.response.start"]
    return [*starts, {"type": "http.response.body", "body": body, "more_body": False}]


async def _moved(waiting: Awaitable[Any], seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await waiting
    except TimeoutError:
        return


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _numbered(scope: Scope, attempt: int | None) -> Scope:
    headers = [(key, value) for key, value in scope["headers"] if key != ATTEMPT]
    if attempt is not None:
        headers.append((ATTEMPT, str(attempt).encode()))
    return {**scope, "headers": headers}
