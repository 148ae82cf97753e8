"""Records to bytes and back: MessagePack between services, JSON from anyone, by content type.

Decoding accepts ``application/json`` and ``application/msgpack`` (header ``content-type``; without one, a value
that begins like a JSON object is JSON). Untrusted bytes meet bounds on size and nesting, and no pickle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any, NoReturn

import msgpack
import orjson
from pydantic import TypeAdapter, ValidationError

from rollmill.errors import PoisonRecordError
from rollmill.models import Manifest, Record

JSON = "application/json"
MSGPACK = "application/msgpack"
SAFETENSORS = "application/vnd.safetensors"

CONTENT_TYPE = "content-type"
MANIFEST = "manifest"
DEAD_LETTER = "dead-letter"
DEAD_LETTER_DECISION = "dead-letter-decision"
ADMIT_OLD = "admit-old"
"""Header with which an operator has a stage take a record of a session that it may have forgotten (rule S2)."""

MAX_BYTES = 64 * 2**20
"""No record that Kafka lets through is larger, and no blob; a bound for what is decoded."""

REFERENCE = b"\xc1rollmill-blob:"
"""Begins a value that refers to a blob (`rollmill.runtime.claim_check`). 0xC1 begins nothing in MessagePack, JSON or a
safetensors file of any possible size, so headers stay as they are and no other value is taken for a reference."""

Headers = tuple[tuple[str, bytes | None], ...]
"""Of a Kafka record, as received. A value may be null, and stays so wherever headers are copied."""


def encode(record: Record, content_type: str = MSGPACK) -> bytes:
    """Bytes of a record. Token arrays are packed in MessagePack and lists in JSON."""
    if content_type == JSON:
        return record.model_dump_json().encode()
    packed: bytes = msgpack.packb(record.model_dump(mode="python"), use_bin_type=True)
    return packed


def decode(kind: Any, value: bytes | None, headers: Headers = ()) -> Any:
    """The record of type ``kind`` (a model or an annotated union) that ``value`` holds.

    Raises PoisonRecordError, and nothing else whatever the bytes are, with reason ``tombstone``, ``too_large``,
    ``unknown_content_type``, ``malformed`` (not decodable), ``invalid`` (decodable, but refused by the model) or
    ``unredeemed`` (a reference to a blob).
    """
    if value is None:
        raise PoisonRecordError("tombstone", "the record has no value")
    if len(value) > MAX_BYTES:
        raise PoisonRecordError("too_large", f"{len(value)} bytes, at most {MAX_BYTES} are read")
    if value.startswith(REFERENCE):
        raise PoisonRecordError("unredeemed", "the value is in object storage, and this is only a reference to it")
    data = parse(value, headers)
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise PoisonRecordError("invalid", _summary(error)) from error
    except Exception as error:  # a validator meets types that it does not expect
        raise PoisonRecordError("invalid", f"{type(error).__name__}: {error}") from error


def _content_type(value: bytes, headers: Headers) -> str:
    declared = header(headers, CONTENT_TYPE)
    if declared is not None:
        return declared.decode("latin-1").partition(";")[0].strip().lower()
    return JSON if value[:1] == b"{" else MSGPACK


def parse(value: bytes, headers: Headers = ()) -> Any:
    """What ``value`` says, before any model. Raises PoisonRecordError ``unknown_content_type`` or ``malformed``."""
    content_type = _content_type(value, headers)
    try:
        if content_type == JSON:
            return orjson.loads(value)
        if content_type == MSGPACK:
            return msgpack.unpackb(value, raw=False, strict_map_key=False)
    except Exception as error:  # noqa: BLE001  # parsers raise many types, that of an unhashable key among them
        _malformed(content_type, error)
    raise PoisonRecordError("unknown_content_type", f"{content_type!r} is neither {JSON} nor {MSGPACK}")


def _malformed(content_type: str, error: Exception) -> NoReturn:
    raise PoisonRecordError("malformed", f"not readable as {content_type}: {error}") from error


@lru_cache(maxsize=64)
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter[Any](kind)  # type: ignore[arg-type]  # an annotated union is a type form, too


def _summary(error: ValidationError) -> str:
    """The first few complaints, without the input: it may be large, and secrets stay out of logs."""
    complaints = error.errors(include_url=False, include_input=False, include_context=False)
    shown = [f"{'.'.join(map(str, item['loc'])) or 'record'}: {item['msg']}" for item in complaints[:5]]
    more = len(complaints) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def header(headers: Iterable[tuple[str, bytes | None]], name: str) -> bytes | None:
    """The last value of a header, as Kafka's own convention has it. None: it is missing, or its value is null."""
    found = None
    for key, value in headers:
        if key == name:
            found = value
    return found


def manifest_header(manifest: Manifest) -> tuple[str, bytes]:
    return (MANIFEST, encode(manifest, JSON))


def read_manifest(headers: Headers) -> Manifest | None:
    """The manifest that a record carries, readable even when its value is not; None where there is none."""
    value = header(headers, MANIFEST)
    if value is None:
        return None
    try:
        manifest: Manifest = decode(Manifest, value, ((CONTENT_TYPE, JSON.encode()),))
    except PoisonRecordError:
        return None
    return manifest
