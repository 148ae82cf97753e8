"""One streamed reply on its way through: what the client may see now, and what waits for the acknowledgement. Pure.

From the frame on that completes the reply (the finish reason of its last choice) everything is held (RULES S4).
"""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.apis.answer import Voice
from rollmill_capture.apis.reply import replayed
from rollmill_capture.engines.reading import Reading
from rollmill_capture.engines.stream import Assembler
from rollmill_capture.served import ServedRequest
from rollmill_capture.sse import Comment, EventParser, EventTooLargeError, ServerEvent


class Relay:
    """Feed it the upstream's bytes; it gives the frames for the client, in the words of ``voice``."""

    def __init__(self, assembler: Assembler, voice: Voice, keep_alive: bytes) -> None:
        self._parser = EventParser()
        self._assembler = assembler
        self._voice = voice
        self._keep_alive = keep_alive
        self._held: list[bytes] = []
        self._done = False

    @property
    def over(self) -> bool:
        """Nothing that follows matters: the stream said that it is done, or it failed."""
        return self._done or self._assembler.failed or self._assembler.over

    @property
    def held(self) -> bytes:
        """The end of a complete reply, to be sent once its record is acknowledged. To be asked for once."""
        return b"".join(self._held) + self._voice.end()

    def feed(self, chunk: bytes) -> bytes:
        """Frames to forward at once."""
        try:
            events = self._parser.feed(chunk)
        except EventTooLargeError as error:
            self._assembler.fail("bad_frame", str(error))
            return b""
        return b"".join(map(self._take, events))

    def reading(self) -> Reading:
        """What the stream has said so far, taken as its end."""
        return self._assembler.reading()

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
        self._assembler.add(chunk)
        if self._assembler.failed:
            return b""
        return self._forward(self._voice.chunk(event, chunk))

    def _forward(self, frames: bytes) -> bytes:
        if not self._assembler.finished:
            return frames
        self._held.append(frames)
        return b""


def make_relay(served: ServedRequest) -> Relay:
    """The relay of a call whose engine streams."""
    assembler = served.wire.assembler(served.choices, served.prompt_ids)
    return Relay(assembler, served.answer.voice(), served.answer.shape.keep_alive)


def as_stream(voice: Voice, body: dict[str, Any]) -> bytes:
    """A whole chat answer, or completion, as the stream that the client asked for."""
    frames = [voice.chunk(ServerEvent(orjson.dumps(chunk)), chunk) for chunk in replayed(body)]
    return b"".join(frames) + voice.end()
