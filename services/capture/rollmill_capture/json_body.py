"""Request bodies: read up to a limit, and parsed as JSON objects."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from rollmill.errors import InvalidInputError
from rollmill_capture.errors import ApiError


def compact_copy(raw: bytes) -> bytes:
    """The same bytes in just the room that they take, for what is kept: what orjson gives holds on to all the room that
    it had set aside, several times the text.
    """
    return bytes(memoryview(raw))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises RefusalError over ``limit`` bytes, and starlette's ClientDisconnect."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise ApiError(413, f"the request is over {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty one. Raises InvalidInputError."""
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError("the request body must be a JSON object")
    return body
