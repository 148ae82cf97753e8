"""The agent's side of a call: the one HTTP response, and what of a streamed reply it may contain now.

`StreamRelay` turns the engine's bytes into frames for the client. From the frame on that completes the reply (the
finish reason of its last choice) it holds everything back, until the record is acknowledged (rule S4).
`ResponseStream` sends the response, keeps a silent stream alive, and notices that the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollmill_capture.apis.api import StreamFormatter
from rollmill_capture.apis.chat_reply import as_chunks
from rollmill_capture.errors import EVENT_STREAM, OPENAI, ApiError, ErrorFormat
from rollmill_capture.proxy.continuation import is_aborted, without_end
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.sse import Comment, EventParser, EventTooLargeError, ServerEvent
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, StreamAssembler
from rollmill_capture.upstream.unusable import SHOWN_BYTES

SETTLED = "rollmill.settled"
"""Key of the request's scope: the reply is recorded and whole, so it may be sent again to a client that retries."""

_ABORT = b'"abort"'


class ResponseStream:
    """Sends one response. A stream starts with its first frame, so that an early error still has a status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_format: ErrorFormat = OPENAI) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._error_format = error_format
        self._started = False
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alive: asyncio.Task[None] | None = None

    async def forward(self, frames: bytes) -> None:
        """Frames of a stream, at once."""
        if frames:
            await self._start()
            await self._send_body(frames, more=True)

    async def reply(self, reply: Response | bytes | ApiError) -> None:
        """The end: a whole response, the last frames of a stream, or an error in the form that is still possible."""
        await self.stop_keepalive()
        if isinstance(reply, bytes):
            await self._start()
            await self._send_body(reply, more=False)
        elif isinstance(reply, ApiError):
            await self._send_error(reply)
        elif self._started:
            await self._send_error(ApiError(reply.status_code, bytes(reply.body).decode("utf-8", "replace")))
        else:
            await reply(self._scope, self._receive, self._send)

    def mark_settled(self) -> None:
        """The reply that comes now is whole and recorded: it may be sent again to a client that retries."""
        self._scope[SETTLED] = True

    async def wait_disconnect(self) -> None:
        """Wait until the client has left, or its response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def start_keepalive(self, seconds: float) -> None:
        """From now on a stream's reader gets something every ``seconds``, until it gets its reply.

        A status can no longer be chosen once the first was sent.
        """
        if self._error_format.keep_alive and self._timer is None:
            self._sent_at = asyncio.get_running_loop().time()
            self._schedule(seconds, seconds)

    async def stop_keepalive(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        sending, self._keep_alive = self._keep_alive, None
        if sending is not None:
            await asyncio.wait((sending,))

    def _schedule(self, delay: float, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay, self._send_keepalive, seconds)

    def _send_keepalive(self, seconds: float) -> None:
        silent = asyncio.get_running_loop().time() - self._sent_at
        if silent >= seconds and (self._keep_alive is None or self._keep_alive.done()):
            self._keep_alive = asyncio.create_task(self.forward(self._error_format.keep_alive))
            silent = 0.0
        self._schedule(max(seconds - silent, 0.001), seconds)

    async def _send_error(self, error: ApiError) -> None:
        if self._started:
            await self._send_body(self._error_format.frame(error.status, str(error)), more=False)
        else:
            await error.response(self._error_format)(self._scope, self._receive, self._send)

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        headers = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._timer is not None:
            self._sent_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class StreamRelay:
    """Feed it the upstream's bytes; it returns the frames for the client, as ``voice`` writes them. Pure."""

    def __init__(
        self,
        assembler: StreamAssembler,
        voice: StreamFormatter,
        keep_alive: bytes,
        continues: Callable[[], bool] = lambda: False,
    ) -> None:
        self._parser = EventParser()
        self._assembler = assembler
        self._voice = voice
        self._keep_alive = keep_alive
        self._continues = continues
        self._held: list[bytes] = []
        self._done = False
        self.beginning = b""
        """First bytes of the body, for a message about what is no stream."""
        self.aborted: dict[str, Any] | None = None
        """The chunk with which the engine broke the reply off; what follows it is ignored."""

    def beginning_of(self, parsed: ParsedReply) -> bytes:
        """First bytes of a body that is no stream; empty: it is one."""
        return self.beginning if parsed.incomplete == "not_sse" else b""

    def start_next_part(self) -> None:
        """What is fed from now on is another stream, with the rest of the reply."""
        self._parser, self._done, self.aborted = EventParser(), False, None

    def add_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Take in a chunk that was in no stream; its frames."""
        return self._forward_chunk(ServerEvent(orjson.dumps(chunk)))

    @property
    def over(self) -> bool:
        """Nothing that follows matters: the stream was marked as done, its format's last frame came, or it failed."""
        return self._done or self._assembler.failed or self._assembler.over or self.aborted is not None

    @property
    def held(self) -> bytes:
        """The end of a complete reply, to be sent once its record is acknowledged. To be asked for once."""
        return b"".join(self._held) + self._voice.format_end()

    def feed(self, chunk: bytes) -> bytes:
        """Frames to forward at once."""
        if self.over:
            return b""  # nor is it kept: what comes after a failure may be as large as what failed
        if len(self.beginning) < SHOWN_BYTES:
            self.beginning += chunk[:SHOWN_BYTES]
        try:
            events = self._parser.feed(chunk)
        except EventTooLargeError as error:
            self._assembler.fail("bad_frame", str(error))
            return b""
        return b"".join(map(self._take_event, events))

    def reading(self) -> ParsedReply:
        """The reply as far as the stream has come, taken as its end."""
        return self._assembler.parsed()

    def _take_event(self, event: ServerEvent | Comment) -> bytes:
        if self.over:
            return b""
        if isinstance(event, Comment):
            return b"" if self._assembler.finished else self._keep_alive
        if event.data.strip() == b"[DONE]":
            self._done = True
            return b""
        return self._forward_chunk(event)

    def _forward_chunk(self, event: ServerEvent) -> bytes:
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError as error:
            self._assembler.fail("bad_frame", f"a frame of the stream is not JSON: {error}")
            return b""
        if _ABORT in event.data and is_aborted(chunk) and self._continues():
            chunk = self.aborted = without_end(chunk)
            event = ServerEvent(orjson.dumps(chunk), event.name)
        self._assembler.add(chunk)
        if self._assembler.failed:
            return b""
        frames = self._voice.format_chunk(event, chunk)
        if not self._assembler.finished:
            return frames
        self._held.append(frames)
        return b""


def make_relay(request: UpstreamRequest, continues: Callable[[], bool] = lambda: False) -> StreamRelay:
    """The relay of a call that the engine streams. ``continues``: whether a reply that is broken off goes on."""
    assembler = request.upstream_format.assembler(request.choices, request.prompt_ids)
    return StreamRelay(
        assembler, request.formatter.stream_formatter(), request.formatter.error_format.keep_alive, continues
    )


def as_stream(voice: StreamFormatter, body: dict[str, Any]) -> bytes:
    """A whole chat answer, or completion, as the stream that the client asked for."""
    frames = [voice.format_chunk(ServerEvent(orjson.dumps(chunk)), chunk) for chunk in as_chunks(body)]
    return b"".join(frames) + voice.format_end()
