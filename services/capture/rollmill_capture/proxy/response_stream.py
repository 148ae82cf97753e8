"""The agent's side of a call: one HTTP response, whole or streamed, and the news that it has left."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollmill_capture.errors import EVENT_STREAM, OPENAI, ApiError, ErrorFormat
from rollmill_capture.http.idempotency import SETTLED


class ResponseStream:
    """Sends one response. A stream starts with its first frame, so that an early error still has a status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, shape: ErrorFormat = OPENAI) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._shape = shape
        self._started = False
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    async def forward(self, frames: bytes) -> None:
        """Frames of a stream, at once."""
        if frames:
            await self._start()
            await self._body(frames, more=True)

    async def reply(self, reply: Response | bytes | ApiError) -> None:
        """The end: a whole response, the last frames of a stream, or an error in the form that is still possible."""
        await self.let_be()
        if isinstance(reply, bytes):
            await self._start()
            await self._body(reply, more=False)
        elif isinstance(reply, ApiError):
            await self._refuse(reply)
        elif self._started:
            await self._refuse(ApiError(reply.status_code, bytes(reply.body).decode("utf-8", "replace")))
        else:
            await reply(self._scope, self._receive, self._send)

    async def _refuse(self, refusal: ApiError) -> None:
        if self._started:
            await self._body(self._shape.frame(refusal.status, str(refusal)), more=False)
        else:
            await refusal.response(self._shape)(self._scope, self._receive, self._send)

    def settled(self) -> None:
        """The reply that comes now is whole and recorded: it may be played again to a client that asks twice."""
        self._scope[SETTLED] = True

    async def left(self) -> None:
        """Wait until the client has gone, or its response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def keep_alive(self, seconds: float) -> None:
        """From now on a stream's reader hears something every ``seconds``, until it gets its reply.

        A status can no longer be chosen once it has heard the first.
        """
        if self._shape.keep_alive and self._timer is None:
            self._sent_at = asyncio.get_running_loop().time()
            self._wait(seconds, seconds)

    async def let_be(self) -> None:
        """The end of keeping alive."""
        if self._timer is not None:
            self._timer.cancel()
        beat, self._beat = self._beat, None
        if beat is not None:
            await asyncio.wait((beat,))

    def _wait(self, left: float, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(left, self._tick, seconds)

    def _tick(self, seconds: float) -> None:
        quiet = asyncio.get_running_loop().time() - self._sent_at
        if quiet >= seconds and (self._beat is None or self._beat.done()):
            self._beat = asyncio.create_task(self.forward(self._shape.keep_alive))
            quiet = 0.0
        self._wait(max(seconds - quiet, 0.001), seconds)

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        if self._timer is not None:
            self._sent_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
