"""Bodies of requests and replies: decoded where they are compressed, and never larger than a limit.

Compressed ones are decoded in small pieces, since a kilobyte can hold a gigabyte of zeros.
Whoever takes the pieces counts them and stops at a limit; no piece is larger than `PIECE`, whatever it was made of.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import httpx
import orjson
from starlette.requests import Request

from rollmill.errors import InvalidInputError
from rollmill_capture.errors import ApiError

FEW_LEVELS = 200
"""A JSON body with as many levels can be recorded."""
LEVELS_AROUND = 32


PIECE = 2**16
_GZIP, _DEFLATE, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")
"""Of the standard library from 3.14 on, and the package with the same for the versions before."""


class UnknownEncodingError(ValueError):
    """The body has an encoding that is not known here."""


class BrokenEncodingError(ValueError):
    """The body is not what its encoding promises."""


class Decoder:
    """Decodes one body. ``make`` gives a decompressor with the methods and fields of zlib's or zstd's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._part = make()
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` adds, in pieces. Raises BrokenEncodingError."""
        while data:
            if self._part.eof:
                self._part = self._make()  # a body may be several compressed parts, one after the other
            self._begun = True
            yield from self._part_of(data)
            data = self._part.unused_data if self._part.eof else b""

    def finish(self) -> None:
        """Raises BrokenEncodingError where the end is missing."""
        if self._begun and not self._part.eof:
            raise BrokenEncodingError("its end is missing")

    def _part_of(self, data: bytes) -> Iterator[bytes]:
        piece = self._decompress(data)
        while piece:
            yield piece
            piece = b"" if self._part.eof else self._decompress(getattr(self._part, "unconsumed_tail", b""))

    def _decompress(self, data: bytes) -> bytes:
        try:
            piece: bytes = self._part.decompress(data, PIECE)
        except Exception as error:  # each library has an error of its own
            raise BrokenEncodingError(str(error)) from error
        return piece


class _Deflate:
    """``deflate`` is zlib's format by the standard, and its bare content by some programs."""

    def __init__(self) -> None:
        self._inner: Any = None

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._inner is None:
            wrapped = data[0] & 0x0F == zlib.DEFLATED and (len(data) == 1 or int.from_bytes(data[:2]) % 31 == 0)
            self._inner = zlib.decompressobj(_DEFLATE if wrapped else _RAW)
        return bytes(self._inner.decompress(data, max_length))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name) if self._inner is not None else {"eof": False}.get(name, b"")


def _zstd() -> Callable[[], Any] | None:
    for name in _ZSTD_MODULES:
        try:
            found: Callable[[], Any] = import_module(name).ZstdDecompressor
        except ImportError:
            continue
        return found
    return None


_MADE: Final[Mapping[str, Callable[[], Any] | None]] = {
    "gzip": lambda: zlib.decompressobj(_GZIP),
    "x-gzip": lambda: zlib.decompressobj(_GZIP),
    "deflate": _Deflate,
    "zstd": _zstd(),
}
KNOWN: Final = tuple(name for name, make in _MADE.items() if make is not None)


def decoder_for(content_encoding: str) -> Decoder | None:
    """None: the body is plain. Raises UnknownEncodingError, for several encodings in a row, too."""
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    make = _MADE.get(name)
    if make is None:
        raise UnknownEncodingError(f"content-encoding {name!r} is not known here: {', '.join(KNOWN)} are")
    return Decoder(make)


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


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, decoded where it is compressed. Raises ApiError (400, 413 over ``limit`` decoded bytes, 415), and
    starlette's ClientDisconnect.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in _decoded(request):
        size += len(piece)
        if size > limit:
            raise ApiError(413, f"the request is over {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _decoded(request: Request) -> AsyncIterator[bytes]:
    encoding = request.headers.get("content-encoding")
    try:
        decoder = None if encoding is None else decoder_for(encoding)
    except UnknownEncodingError as error:
        raise ApiError(415, str(error)) from error
    try:
        async for chunk in request.stream():
            for piece in (chunk,) if decoder is None else decoder.feed(chunk):
                yield piece
        if decoder is not None:
            decoder.finish()
    except BrokenEncodingError as error:
        raise ApiError(400, f"the compressed request body is broken: {error}") from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty one. Raises InvalidInputError, also where it cannot be recorded."""
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError("the request body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > FEW_LEVELS and _is_too_deep(body):
        raise InvalidInputError(f"the request body is nested too deep: {FEW_LEVELS} levels are always accepted")
    return body


def _is_too_deep(body: object) -> bool:
    """Serialisers stop at some 250 levels, and the records of a body have a few around it."""
    for _ in range(LEVELS_AROUND):
        body = [body]
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        return True
    return False
