"""Digests of content: is a record that comes again the same one?"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import orjson

from rollmill.errors import PoisonRecordError
from rollmill.models import Record, dump_json

HASH_BYTES = 8


def id_hash(completion_id: str) -> bytes:
    return hashlib.blake2b(completion_id.encode(), digest_size=HASH_BYTES).digest()


def content_digest(record: Record) -> bytes:
    """Digest of a record's content, however it was encoded. Raises PoisonRecordError ``invalid``."""
    try:
        return hashlib.blake2b(_canonical(record), digest_size=16).digest()
    except (TypeError, ValueError) as error:
        raise PoisonRecordError("invalid", f"the record holds what JSON cannot say: {error}") from error


def _canonical(value: Any) -> bytes:
    if isinstance(value, Record):
        return b"".join(_framed(name.encode(), _canonical(item)) for name, item in value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, bytes):
        return dump_json(orjson.loads(value))
    if isinstance(value, tuple):
        return b"".join(_framed(b"", _canonical(item)) for item in value)
    return dump_json(value)


def _framed(name: bytes, content: bytes) -> bytes:
    return b"%s %d:%s" % (name, len(content), content)
