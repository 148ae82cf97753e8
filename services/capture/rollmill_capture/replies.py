"""Answers of capture's own, in OpenAI's shapes."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from rollmill.errors import RollmillError

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 409: "conflict_error", 422: "invalid_request_error"}


class RefusalError(RollmillError):
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

    def response(self) -> Response:
        hints = {"retry-after": str(math.ceil(self.retry_after))} if self.retry else {"x-should-retry": "false"}
        return json_response(error_body(self.status, str(self), self.param), self.status, hints)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_frame(status: int, message: str) -> bytes:
    """The frame that tells a stream's reader that the reply is not whole; stock clients raise on it."""
    return b"data: " + orjson.dumps(error_body(status, message)) + b"\n\n"


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, JSON)
