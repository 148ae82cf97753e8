"""An incremental parser of server-sent events: bytes in, events out, whatever the cuts between the chunks.

Source: WHATWG HTML standard, section "Server-sent events"; fields ``id`` and ``retry`` are read and dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmill.errors import RollmillError

MAX_EVENT = 32 * 2**20
"""Largest event in bytes; beyond it a peer is broken or hostile."""
LINE_COST = 64
"""Bytes that a line counts beside its text: a stream of empty lines must come to an end, too."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLargeError(RollmillError):
    """A line or an event grew over `MAX_EVENT`."""


@dataclass(frozen=True)
class ServerEvent:
    """One dispatched event. ``data`` is never empty; its lines are joined by a line feed."""

    data: bytes
    name: str = "message"


@dataclass(frozen=True)
class Comment:
    """A comment line: how servers keep a silent connection alive."""


class EventParser:
    """Feed it chunks; it keeps an unfinished line and an unfinished event. Bytes of a character split over chunks
    stay together, because only whole lines are looked at.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self._mark = _BYTE_ORDER_MARK
        self._after_return = False
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerEvent | Comment]:
        """The events and comments that ``chunk`` completes. Raises EventTooLargeError."""
        found = [self._line(line) for line in self._lines(chunk)]
        if len(self._tail) + self._size > MAX_EVENT:
            raise EventTooLargeError(f"an event of the upstream's stream is over {MAX_EVENT} bytes")
        return [item for item in found if item is not None]

    def _lines(self, chunk: bytes) -> list[bytes]:
        # A line feed after the carriage return that ended the last chunk is the second half of one line end.
        text = chunk.removeprefix(b"\n") if self._after_return else chunk
        self._after_return = chunk.endswith(b"\r") if chunk else self._after_return
        first, *more = _LINE_END.split(text)
        self._tail += first
        if not more:
            return []
        lines = [bytes(self._tail), *more]
        self._tail = bytearray(lines.pop())
        lines[0], self._mark = lines[0].removeprefix(self._mark), b""
        return lines

    def _line(self, line: bytes) -> ServerEvent | Comment | None:
        if not line:
            return self._dispatch()
        if line.startswith(b":"):
            return Comment()
        name, _, value = line.partition(b":")
        self._field(name, value.removeprefix(b" "))
        return None

    def _field(self, name: bytes, value: bytes) -> None:
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + LINE_COST
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")

    def _dispatch(self) -> ServerEvent | None:
        data, name = b"\n".join(self._data), self._name
        self._data, self._name, self._size = [], "", 0
        return ServerEvent(data, name or "message") if data else None
