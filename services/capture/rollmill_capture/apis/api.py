"""What an API has to say: how a request is understood, and how the engine's answer is given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.errors import ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.parsed_reply import Ids
from rollmill_capture.upstream.formats.upstream_format import UpstreamFormat


class StreamFormatter(Protocol):
    """Gives a streamed reply to the client, chunk by chunk."""

    def chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        """Frames for one chunk of the engine; empty: nothing to say. May change ``chunk``."""
        ...

    def end(self) -> bytes:
        """The end of a complete reply, after its last chunk."""
        ...


class ResponseFormatter(Protocol):
    """Gives the engine's reply back in the API of the request."""

    @property
    def shape(self) -> ErrorFormat: ...

    def voice(self) -> StreamFormatter: ...

    def whole(self, raw: bytes, body: Any) -> bytes:
        """A whole reply. ``body`` is ``raw`` parsed, and may be changed."""
        ...


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request, understood."""

    wire: UpstreamFormat
    """How the engine is asked."""
    fields: dict[str, Any]
    """The body for the engine, without what capture needs."""
    answer: ResponseFormatter
    stream: bool
    choices: int = 1
    prompt_ids: Ids | None = None
    """[p] int32, where the request gave the prompt as ids."""
    translated: bool = False
    """``fields`` is not the client's own body."""
    ignored: tuple[str, ...] = ()
    """Fields of the client that have no meaning for the engine."""


class ApiAdapter(Protocol):
    """One API that clients speak."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> ErrorFormat: ...

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        """Understand a request; ``place`` holds the parameters of its path. Raises InvalidInputError."""
        ...
