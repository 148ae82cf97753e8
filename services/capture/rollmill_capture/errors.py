"""Errors for clients, in the format of the caller's API; in OpenAI's where the path is of no API."""

from __future__ import annotations

import math
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from rollmill.errors import RollmillError

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

_CLOSING = (408, 413)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""OpenAI's names; every other status from 400 is "invalid_request_error", and from 500 "server_error"."""
_SERVER_ERROR = 500


class ErrorFormat(Protocol):
    """How one API writes an error."""

    @property
    def keep_alive(self) -> bytes:
        """What keeps a silent stream alive; empty: its stock client accepts nothing of the kind."""
        ...

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        """The body of an error."""
        ...

    def frame(self, status: int, message: str) -> bytes:
        """The frame that ends a stream without a whole reply; stock clients raise on it."""
        ...


class OpenAiErrorFormat:
    """Chat completions, completions, and everything that is capture's own."""

    keep_alive = b": keep-alive\n\n"

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, message, param)

    def frame(self, status: int, message: str) -> bytes:
        return b"data: " + orjson.dumps(error_body(status, message)) + b"\n\n"


OPENAI = OpenAiErrorFormat()


class ApiError(RollmillError):
    """A request that ends in an error; ``retry`` tells OpenAI's clients whether to try again by themselves."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry: bool = False,
        retry_after: float = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry = retry
        self.retry_after = retry_after

    def response(self, shape: ErrorFormat = OPENAI) -> Response:
        # What is left of a request that came too slowly, or is too large, is not waited for.
        close = {"connection": "close"} if self.status in _CLOSING else {}
        hints = {"retry-after": str(math.ceil(self.retry_after))} if self.retry else {"x-should-retry": "false"}
        return json_response(shape.error(self.status, str(self), self.param), self.status, {**hints, **close})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < _SERVER_ERROR else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, JSON)
