"""One HTTP request to an ASGI application, without a server; the response is read piece by piece, as it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Self

import orjson

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class AsgiCall:
    """Use as ``async with``; leaving the block ends the request. ``leave()``: the client disconnects."""

    def __init__(
        self, app: Application, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._app = app
        self._scope = _scope(method, path, headers or {})
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        self._requests.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        await self._task

    def query(self, query: bytes) -> None:
        """Set the query string, before the request begins."""
        self._scope["query_string"] = query

    @property
    def waiting(self) -> bool:
        """Everything that the application has sent so far was read."""
        return self._sent.empty()

    def leave(self) -> None:
        self._requests.put_nowait({"type": "http.disconnect"})

    async def piece(self) -> bytes | None:
        """The next non-empty piece of the body; None at its end."""
        while (message := await self._sent.get()) is not None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
            elif message.get("body"):
                return bytes(message["body"])
        return None

    async def rest(self) -> bytes:
        """The rest of the body."""
        pieces = []
        while (piece := await self.piece()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    async def json(self) -> Any:
        return orjson.loads(await self.rest())

    async def ended(self) -> None:
        """Wait until the application has finished the request."""
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._requests.get, self._sent.put)
        finally:
            self._sent.put_nowait(None)


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path.partition("?")[0],
        "raw_path": path.partition("?")[0].encode(),
        "root_path": "",
        "query_string": path.partition("?")[2].encode(),
        "headers": [(key.lower().encode(), value.encode()) for key, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
