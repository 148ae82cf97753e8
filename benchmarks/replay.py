"""An engine that only replays: streams in vLLM's format, paced as an engine samples, or a token after the other.

Run as a process of its own: ``python -m benchmarks.replay``; it prints its port. The model's name says how it answers:
``paced`` or ``fast``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

PROMPT_TOKENS = 1024
CHUNKS = 24
FIRST_SECONDS, GAP_SECONDS = 0.1, 0.04
"""To the first token, and from each to the next: a stream lasts about a second."""
STREAM_SECONDS = FIRST_SECONDS + (CHUNKS + 1) * GAP_SECONDS

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def frames() -> list[bytes]:
    """The frames of one stream: role and prompt's ids, a token each, the end."""
    first = _chunk({"role": "assistant", "content": ""}, [], prompt_token_ids=list(range(1000, 1000 + PROMPT_TOKENS)))
    middle = [_chunk({"content": f" word{number}"}, [number]) for number in range(CHUNKS)]
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": CHUNKS, "total_tokens": PROMPT_TOKENS + CHUNKS}
    end = [_chunk({"content": ""}, [], "stop"), {**_chunk({}, []), "choices": [], "usage": usage}]
    last = b"".join([*map(_frame, end), b"data: [DONE]\n\n"])
    return [_sized(_frame(first)), *(_sized(_frame(chunk)) for chunk in middle), _sized(last) + LAST]


def _chunk(delta: dict[str, Any], ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {"token": f" word{number}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for number in ids
    ]
    choice = {"index": 0, "delta": delta, "logprobs": {"content": entries}, "finish_reason": finish, "token_ids": ids}
    head = {"id": "chatcmpl-replay", "object": "chat.completion.chunk", "created": 1, "model": "replay"}
    return {**head, "choices": [choice], **more}


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _sized(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class Replay(asyncio.Protocol):
    """One connection: a request, its stream, the next request."""

    FRAMES = frames()

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < _length(head):
            return
        self._received = b""
        if head.startswith(b"GET"):
            self._write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif b'"fast"' in body:
            self._tell(0, 0.0)
        else:
            self._later(FIRST_SECONDS, 0, GAP_SECONDS)

    def _later(self, seconds: float, number: int, gap: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tell, number, gap)

    def _tell(self, number: int, gap: float) -> None:
        self._write(HEAD + self.FRAMES[0] if number == 0 else self.FRAMES[number])
        if number + 1 < len(self.FRAMES):
            self._later(gap, number + 1, gap)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Replay, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
