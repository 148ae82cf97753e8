"""The header of a batch, read without its tensors."""

from __future__ import annotations

import struct

import orjson

from rollmill.codec import CONTENT_TYPE, JSON, decode
from rollmill.errors import PoisonRecordError
from rollmill.models import BatchHeader

LENGTH = struct.Struct("<Q")
HEADER = "header"
"""Key of the batch header in the metadata of safetensors."""


def batch_header(value: bytes) -> BatchHeader:
    """The header of a micro-batch in safetensors: 8 bytes of length, JSON, tensors. Raises PoisonRecordError."""
    try:
        (length,) = LENGTH.unpack_from(value)
        text: str = orjson.loads(value[LENGTH.size : LENGTH.size + length])["__metadata__"][HEADER]
        packed = text.encode()
    except (struct.error, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PoisonRecordError("malformed", f"no batch in safetensors with a batch header: {error}") from error
    header: BatchHeader = decode(BatchHeader, packed, ((CONTENT_TYPE, JSON.encode()),))
    return header
