"""Digests of content: is a record that comes again the same one?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson

from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, Record, dump_json
from rollmill_builder.storage.call_parts import Parts, parts_of

HASH_BYTES = 8


def id_hash(completion_id: str) -> bytes:
    return hashlib.blake2b(completion_id.encode(), digest_size=HASH_BYTES).digest()


def content_digest(record: Record) -> bytes:
    """Digest of a record's content, however it was encoded. Raises PoisonRecordError ``invalid``."""
    with _invalid():
        return hashlib.blake2b(_canonical(record), digest_size=16).digest()


def call_digest(record: CompletionRecord) -> tuple[bytes, Parts]:
    """The same for a call, and its parts. Raises PoisonRecordError ``invalid``."""
    with _invalid():
        parts = parts_of(record)
        digest = hashlib.blake2b(_canonical(record.model_copy(update={"request": None})), digest_size=16)
        for part in (parts.others, parts.messages):
            digest.update(_framed(b"none", b"") if part is None else _framed(b"some", part))
        return digest.digest(), parts


@contextmanager
def _invalid() -> Iterator[None]:
    try:
        yield
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
