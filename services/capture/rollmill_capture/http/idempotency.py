"""Clients that try again: one idempotency key of one session is one call upstream (bug class: retries that run twice).

While a call with the key runs, a second one waits for its reply; for a while after it has ended its reply is sent again
from memory. A call that failed leaves nothing, and the next one with its key is the next attempt. One key for two
different requests (by path and body) is a mistake of the client, and refused: it must not get the reply to another
request. Keys are known to this replica alone, as are the calls in flight: the ingress has session affinity (rule S3).
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
"""Header by which the call inside learns its number; a client's own value is dropped."""
KEY_LENGTH = 256
UNPROCESSABLE = 422
MOST_KEYS = 100_000
"""Keys that are remembered, for a reply or for the number of attempts."""


@dataclass
class _KnownKey:
    """What is known of one key."""

    attempts: int = 0
    running: bool = False
    waiting: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call that runs has ended, or when another request came to wait for it."""
    digest: bytes = b""
    """Digest of the path and body of the call that ran last."""
    reply: list[Message] | None = None
    size: int = 0
    until: float = 0.0


class Idempotency:
    """``seconds``: how long replies are kept; ``max_bytes``: of all of them; ``grace``: seconds for which a call goes
    on after its client has left, for the client's next try.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        seconds: float = 600.0,
        max_bytes: int = 256 * 2**20,
        grace: float = 2.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._grace = grace
        self._now = now
        self._known: dict[tuple[str, bytes], _KnownKey] = {}
        self._ended: OrderedDict[tuple[str, bytes], _KnownKey] = OrderedDict()
        """Of them those that have ended, in that order: one that runs for long keeps none of them."""
        self._kept_bytes = 0

    def around(self, app: ASGIApp, scope_of: Callable[[Scope], Awaitable[str | None]]) -> ASGIApp:
        """``app``, called once for each key. ``scope_of`` names what the keys of a request are unique in; None: let
        ``app`` refuse the request.
        """
        return _IdempotentEndpoint(self, app, scope_of)

    async def enter(self, name: tuple[str, bytes], app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._known.setdefault(name, _KnownKey())
        await self._wait(known)
        if known.reply is not None and known.until > self._now():
            await self._replay(known, known.reply, scope, receive, send)
            return
        await self._run(name, known, app, scope, receive, send)

    async def _replay(self, known: _KnownKey, reply: list[Message], scope: Scope, receive: Receive, send: Send) -> None:
        if await _digest_of_request(scope, receive) != known.digest:
            message = (
                "this idempotency-key was used for another request of the session; every call has a key of its own"
            )
            await ApiError(UNPROCESSABLE, message).response()(scope, receive, send)
            return
        self._metrics.count("replayed_replies")
        for part in reply:
            await send(part)

    async def _wait(self, known: _KnownKey) -> None:
        known.waiting += 1
        known.changed.set()
        try:
            while known.running:
                known.changed.clear()
                await known.changed.wait()
        finally:
            known.waiting -= 1

    async def _run(
        self, name: tuple[str, bytes], known: _KnownKey, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._known[name] = known
        self._kept_bytes -= self._ended.pop(name, _KnownKey()).size
        known.attempts, known.running, known.size, messages = known.attempts + 1, True, 0, list[Message]()

        async def recording_send(message: Message) -> None:
            messages.append(message)
            await send(message)

        inside, digest = _with_attempt(scope, known.attempts), _digest(scope)
        try:
            await app(inside, self._delay_disconnect(known, receive, digest), recording_send)
        finally:
            known.running, known.digest = False, digest.digest()
            known.changed.set()
            self._keep(name, known, messages if inside.get(SETTLED) else None)

    def _delay_disconnect(self, known: _KnownKey, receive: Receive, digest: hashlib.blake2b) -> Receive:
        """The client's disconnect is reported later: not while another request waits for the reply, or may come to
        do so. The body goes into ``digest`` as it is read.
        """

        async def delayed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._wait_unwanted(known)
            else:
                digest.update(message.get("body", b""))
            return message

        return delayed_receive

    async def _wait_unwanted(self, known: _KnownKey) -> None:
        """Returns when no request waits for the reply any more, and none is expected."""
        deadline = self._now() + self._grace
        while known.running and (known.waiting or self._now() < deadline):
            known.changed.clear()
            left = None if known.waiting else max(deadline - self._now(), 0.001)
            await _wait_for(known.changed.wait(), left)

    def _keep(self, name: tuple[str, bytes], known: _KnownKey, messages: list[Message] | None) -> None:
        if messages is not None:
            known.reply, known.until = _in_two_messages(messages), self._now() + self._seconds
            known.size = sum(len(message.get("body", b"")) for message in known.reply)
            self._kept_bytes += known.size
        self._ended[name] = known
        self._forget()

    def _forget(self) -> None:
        """Drop what is too old, and the oldest where all together are too large or too many."""
        while self._ended:
            name, known = next(iter(self._ended.items()))
            if not self._is_over(known):
                return
            self._kept_bytes -= known.size
            del self._ended[name]
            if self._known.get(name) is known:
                del self._known[name]

    def _is_over(self, known: _KnownKey) -> bool:
        old = known.reply is not None and known.until <= self._now()
        return old or self._kept_bytes > self._max_bytes or len(self._ended) > MOST_KEYS


@dataclass(frozen=True)
class _IdempotentEndpoint:
    """An ASGI application; no function, which a router would take for another kind of endpoint."""

    idempotency: Idempotency
    app: ASGIApp
    scope_of: Callable[[Scope], Awaitable[str | None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _header(scope, KEY)
        session = None if key is None else await self.scope_of(scope)
        if key is None or session is None:
            await self.app(_with_attempt(scope, None), receive, send)
        else:
            await self.idempotency.enter((session, key[:KEY_LENGTH]), self.app, scope, receive, send)


def _digest(scope: Scope) -> hashlib.blake2b:
    return hashlib.blake2b(str(scope["path"]).encode(), digest_size=16)


async def _digest_of_request(scope: Scope, receive: Receive) -> bytes:
    """Digest of a request that is read to its end; where the client leaves before, as far as it came."""
    digest, more = _digest(scope), True
    while more:
        message = await receive()
        digest.update(message.get("body", b""))
        more = message.get("more_body", False)
    return digest.digest()


def _in_two_messages(messages: list[Message]) -> list[Message]:
    """The same reply in two messages: a stream's many small ones would take several times the room of their bytes."""
    body = compact_copy(b"".join(message.get("body", b"") for message in messages))
    starts = [message for message in messages if message["type"] == "http.response.start"]
    return [*starts, {"type": "http.response.body", "body": body, "more_body": False}]


async def _wait_for(waiting: Awaitable[Any], seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await waiting
    except TimeoutError:
        return


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _with_attempt(scope: Scope, attempt: int | None) -> Scope:
    headers = [(key, value) for key, value in scope["headers"] if key != ATTEMPT]
    if attempt is not None:
        headers.append((ATTEMPT, str(attempt).encode()))
    return {**scope, "headers": headers}
