"""Compressed bodies, of clients and of upstreams, decoded in small pieces: a kilobyte can hold a gigabyte of zeros.

Whoever takes the pieces counts them and stops at a limit; no piece is larger than `PIECE`, whatever it was made of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

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
