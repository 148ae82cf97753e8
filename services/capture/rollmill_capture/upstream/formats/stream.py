"""What all assemblers of streams share: how a stream fails, and how it is seen to be unfinished. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollmill_capture.upstream.formats.chat import error_of
from rollmill_capture.upstream.formats.parsed_reply import Incomplete, ParsedReply


class Assembler(ABC):
    """Gathers the parsed ``data`` of one stream. ``over``: the format says by itself that nothing more will come."""

    def __init__(self) -> None:
        self._failure: tuple[Incomplete, str | None] | None = None
        self._chunks = 0
        self.over = False

    def add(self, chunk: Any) -> None:
        """One parsed ``data``. Raises nothing, whatever it is."""
        error = self._error(chunk)
        if error is not None:
            self.fail("error_frame", error)
        elif isinstance(chunk, dict):
            self._chunks += 1
            self._add(chunk)
        else:
            self.fail("bad_frame", "a frame of the stream is no JSON object")

    def fail(self, why: Incomplete, message: str | None) -> None:
        """Nothing that comes later makes this a whole reply; the first reason stays."""
        self._failure = self._failure or (why, message)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Every choice that was asked for has come to its end."""

    def reading(self) -> ParsedReply:
        """What the stream has said, taken as ended here."""
        why, error = self._failure or (self._unfinished(), None)
        return self._reading(why, error)

    def _unfinished(self) -> Incomplete | None:
        if self.finished:
            return None
        return "no_terminal_frame" if self._chunks else "not_sse"

    def _error(self, chunk: Any) -> str | None:
        return error_of(chunk)

    @abstractmethod
    def _add(self, chunk: dict[str, Any]) -> None: ...

    @abstractmethod
    def _reading(self, why: Incomplete | None, error: str | None) -> ParsedReply: ...
