"""The interface of an API: how a request is parsed, and how the engine's reply is formatted for the client."""

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
    """Formats a streamed reply for the client, chunk by chunk."""

    def format_chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        """Frames for one chunk of the engine; empty: the chunk has nothing for the client. May change ``chunk``."""
        ...

    def format_end(self) -> bytes:
        """The end of a complete reply, after its last chunk."""
        ...


class ResponseFormatter(Protocol):
    """Formats the engine's reply in the API of the request."""

    @property
    def error_format(self) -> ErrorFormat: ...

    def stream_formatter(self) -> StreamFormatter: ...

    def format_body(self, raw: bytes, body: Any) -> bytes:
        """A whole reply. ``body`` is ``raw`` parsed, and may be changed."""
        ...


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request, parsed."""

    upstream_format: UpstreamFormat
    """The format in which the engine is asked."""
    fields: dict[str, Any]
    """The body for the engine, without what capture needs."""
    formatter: ResponseFormatter
    stream: bool
    choices: int = 1
    prompt_ids: Ids | None = None
    """[p] int32, where the request gave the prompt as ids."""
    translated: bool = False
    """``fields`` is not the client's own body."""
    ignored: tuple[str, ...] = ()
    """Fields of the client that have no meaning for the engine."""


class ApiAdapter(Protocol):
    """One API for clients."""

    @property
    def name(self) -> str: ...

    @property
    def error_format(self) -> ErrorFormat: ...

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        """``params``: of the path and the query; ``history``: of the call's session. Raises InvalidInputError."""
        ...
