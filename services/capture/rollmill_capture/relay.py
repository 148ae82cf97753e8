"""One streamed reply on its way through: what the client may see now, and what waits for the acknowledgement. Pure.

From the frame on that completes the reply (the finish reason of its last choice) everything is held (RULES S4).
"""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.engines.chat_stream import ChatAssembler
from rollmill_capture.engines.reading import Reading
from rollmill_capture.served import Wants, only_usage, without_details
from rollmill_capture.sse import Comment, EventParser, EventTooLargeError, ServerEvent

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ChatRelay:
    """Feed it the upstream's bytes; it gives the frames for the client, without ids that it did not ask for."""

    def __init__(self, wants: Wants, choices: int) -> None:
        self._wants = wants
        self._parser = EventParser()
        self._assembler = ChatAssembler(choices)
        self._held: list[bytes] = []
        self._done = False

    @property
    def over(self) -> bool:
        """Nothing that follows matters: the stream said that it is done, or it failed."""
        return self._done or self._assembler.failed

    @property
    def held(self) -> bytes:
        """The end of a complete reply, to be sent once its record is acknowledged."""
        return b"".join(self._held) + DONE

    def feed(self, chunk: bytes) -> bytes:
        """Frames to forward at once."""
        try:
            events = self._parser.feed(chunk)
        except EventTooLargeError as error:
            self._assembler.fail("bad_frame", str(error))
            return b""
        return b"".join(frame for frame in map(self._take, events) if frame)

    def reading(self) -> Reading:
        """What the stream has said so far, taken as its end."""
        return self._assembler.reading()

    def _take(self, event: ServerEvent | Comment) -> bytes | None:
        if self.over:
            return None
        if isinstance(event, Comment):
            return None if self._assembler.finished else KEEP_ALIVE
        if event.data.strip() == b"[DONE]":
            self._done = True
            return None
        return self._chunk(event.data)

    def _chunk(self, data: bytes) -> bytes | None:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self._assembler.fail("bad_frame", f"a frame of the stream is not JSON: {error}")
            return None
        self._assembler.add(chunk)
        if self._assembler.failed:
            return None
        return self._forward(self._frame(data, chunk))

    def _frame(self, data: bytes, chunk: dict[str, Any]) -> bytes | None:
        if only_usage(chunk) and not self._wants.usage:
            return None
        if self._wants.all_details:
            return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"
        return b"data: " + orjson.dumps(without_details(chunk)) + b"\n\n"

    def _forward(self, frame: bytes | None) -> bytes | None:
        if frame is None or not self._assembler.finished:
            return frame
        self._held.append(frame)
        return None
