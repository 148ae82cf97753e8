"""Compressed bodies: whatever they hold, they come in small pieces, and as they were before."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill_capture.bodies import PIECE, BrokenEncodingError, UnknownEncodingError, decoder_for


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("Deflate ", _raw_deflate),
    "several parts": ("x-gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
}


def decoded(encoding: str, chunks: list[bytes]) -> bytes:
    decoder = decoder_for(encoding)
    assert decoder is not None
    pieces = [piece for chunk in chunks for piece in decoder.feed(chunk)]
    decoder.finish()
    assert max(map(len, pieces), default=0) <= PIECE
    return b"".join(pieces)


@pytest.mark.parametrize("name", ENCODERS)
@given(data=st.binary(max_size=3000), repeats=st.integers(1, 60), step=st.integers(2, 500))
def test_a_body_comes_out_as_it_was(name: str, data: bytes, repeats: int, step: int) -> None:
    encoding, compress = ENCODERS[name]
    whole = data * repeats
    packed = compress(whole)
    chunks = [packed[start : start + step] for start in range(0, len(packed), step)]
    assert decoded(encoding, chunks) == whole


def test_f16_a_bomb_is_decoded_piece_by_piece() -> None:
    decoder = decoder_for("gzip")
    assert decoder is not None
    pieces = decoder.feed(gzip.compress(bytes(2**28)))
    assert [len(next(pieces)) for _ in range(3)] == [PIECE, PIECE, PIECE]


@pytest.mark.parametrize("encoding", ["", "identity", " Identity"])
def test_a_plain_body_needs_no_decoder(encoding: str) -> None:
    assert decoder_for(encoding) is None


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress", "zstandard"])
def test_an_encoding_that_is_not_known_is_named(encoding: str) -> None:
    with pytest.raises(UnknownEncodingError, match=encoding):
        decoder_for(encoding)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_body_that_breaks_off_is_no_whole_one(name: str) -> None:
    encoding, compress = ENCODERS[name]
    with pytest.raises(BrokenEncodingError, match="end is missing"):
        decoded(encoding, [compress(b"hello " * 100)[:-1]])


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_none_is_refused(encoding: str) -> None:
    with pytest.raises(BrokenEncodingError):
        decoded(encoding, [b'{"messages": []}'])
