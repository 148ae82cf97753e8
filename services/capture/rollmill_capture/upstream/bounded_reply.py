"""Replies of upstreams, bounded: compressed ones are decoded in small pieces, and whole ones are read up to a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from rollmill_capture.content_encoding import BrokenEncodingError, Decoder, UnknownEncodingError, decoder_for

ENCODING = "content-encoding"


class ReplyTooLargeError(httpx.DecodingError):
    """A whole reply is larger than the setting allows."""


class DecodingTransport(httpx.AsyncBaseTransport):
    """Decodes in place of httpx, which decodes all that came at once, however much that becomes."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if ENCODING not in response.headers:
            return response
        try:
            decoder = decoder_for(response.headers.pop(ENCODING))
        except UnknownEncodingError as error:
            await response.aclose()
            raise httpx.DecodingError(str(error), request=request) from error
        response.headers.pop("content-length", None)
        if decoder is not None and isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _DecodedStream(response.stream, decoder)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _DecodedStream(httpx.AsyncByteStream):
    def __init__(self, body: httpx.AsyncByteStream, decoder: Decoder) -> None:
        self._body = body
        self._decoder = decoder

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._body:
                for piece in self._decoder.feed(chunk):
                    yield piece
            self._decoder.finish()
        except BrokenEncodingError as error:
            raise httpx.DecodingError(f"the compressed reply is broken: {error}") from error

    async def aclose(self) -> None:
        await self._body.aclose()


async def read_whole(response: httpx.Response, limit: int) -> bytes:
    """The body. Raises ReplyTooLargeError over ``limit`` decoded bytes; the rest is then not read."""
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > limit:
            raise ReplyTooLargeError(f"its reply is over {limit} bytes (ROLLMILL_REPLY_BYTES)")
        pieces.append(piece)
    return b"".join(pieces)
