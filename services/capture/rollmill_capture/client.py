"""The agent's side of a call: one HTTP response, whole or streamed, and the news that it has left."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollmill_capture.fence import SETTLED
from rollmill_capture.replies import EVENT_STREAM, RefusalError, error_frame


class Client:
    """Sends one response. A stream starts with its first frame, so that an early error still has a status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = False

    async def forward(self, frames: bytes) -> None:
        """Frames of a stream, at once."""
        if frames:
            await self._start()
            await self._body(frames, more=True)

    async def reply(self, reply: Response | bytes | RefusalError) -> None:
        """The end: a whole response, the last frames of a stream, or an error in the form that is still possible."""
        if isinstance(reply, bytes):
            await self._start()
            await self._body(reply, more=False)
        elif isinstance(reply, Response):
            await reply(self._scope, self._receive, self._send)
        elif self._started:
            await self._body(error_frame(reply.status, str(reply)), more=False)
        else:
            await reply.response()(self._scope, self._receive, self._send)

    def settled(self) -> None:
        """The reply that comes now is whole and recorded: it may be played again to a client that asks twice."""
        self._scope[SETTLED] = True

    async def left(self) -> None:
        """Wait until the client has gone, or its response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
