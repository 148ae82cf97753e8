"""One streamed reply on its way through: what the client may see now, and what waits for the acknowledgement. Pure.

From the frame on that completes the reply (the finish reason of its last choice) everything is held (rule S4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from rollmill_capture.apis.api import StreamFormatter
from rollmill_capture.apis.chat_reply import as_chunks
from rollmill_capture.proxy.continuation import is_aborted, without_end
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.sse import Comment, EventParser, EventTooLargeError, ServerEvent
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, StreamAssembler

_ABORT = b'"abort"'


class StreamRelay:
    """Feed it the upstream's bytes; it gives the frames for the client, in the words of ``voice``."""

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
        self.aborted: dict[str, Any] | None = None
        """The chunk with which the engine broke the reply off; what it says after that is passed over."""

    def go_on(self) -> None:
        """What is fed from now on is another stream, with the rest of the reply."""
        self._parser, self._done, self.aborted = EventParser(), False, None

    def tell(self, chunk: dict[str, Any]) -> bytes:
        """Take in a chunk that no stream has brought; its frames."""
        return self._chunk(ServerEvent(orjson.dumps(chunk)))

    @property
    def over(self) -> bool:
        """Nothing that follows matters: the stream said that it is done, or it failed."""
        return self._done or self._assembler.failed or self._assembler.over or self.aborted is not None

    @property
    def held(self) -> bytes:
        """The end of a complete reply, to be sent once its record is acknowledged. To be asked for once."""
        return b"".join(self._held) + self._voice.format_end()

    def feed(self, chunk: bytes) -> bytes:
        """Frames to forward at once."""
        try:
            events = self._parser.feed(chunk)
        except EventTooLargeError as error:
            self._assembler.fail("bad_frame", str(error))
            return b""
        return b"".join(map(self._take, events))

    def reading(self) -> ParsedReply:
        """What the stream has said so far, taken as its end."""
        return self._assembler.parsed()

    def _take(self, event: ServerEvent | Comment) -> bytes:
        if self.over:
            return b""
        if isinstance(event, Comment):
            return b"" if self._assembler.finished else self._keep_alive
        if event.data.strip() == b"[DONE]":
            self._done = True
            return b""
        return self._chunk(event)

    def _chunk(self, event: ServerEvent) -> bytes:
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
        return self._forward(self._voice.format_chunk(event, chunk))

    def _forward(self, frames: bytes) -> bytes:
        if not self._assembler.finished:
            return frames
        self._held.append(frames)
        return b""


def make_relay(served: UpstreamRequest, continues: Callable[[], bool] = lambda: False) -> StreamRelay:
    """The relay of a call whose engine streams. ``continues``: whether a reply that is broken off goes on."""
    assembler = served.wire.assembler(served.choices, served.prompt_ids)
    return StreamRelay(assembler, served.answer.stream_formatter(), served.answer.error_format.keep_alive, continues)


def as_stream(voice: StreamFormatter, body: dict[str, Any]) -> bytes:
    """A whole chat answer, or completion, as the stream that the client asked for."""
    frames = [voice.format_chunk(ServerEvent(orjson.dumps(chunk)), chunk) for chunk in as_chunks(body)]
    return b"".join(frames) + voice.format_end()
