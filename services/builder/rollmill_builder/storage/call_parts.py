"""A call taken apart: token ids and texts, which repeat from call to call, and the rest, which is small.

Beside it, what identifies a call: its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import orjson

from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, Record, SampledChoice, dump_json
from rollmill_builder.storage.trie import Bytes

Message = dict[str, Any]
"""A chat message."""

SEQUENCE_FIELDS: dict[str, Any] = {
    "session_id": True,
    "attempt": True,
    "completion_id": True,
    "prompt_ids": True,
    "original_request": True,
    "request": True,
    "response": True,
    "choices": {"__all__": {"token_ids", "message"}},
}
"""What the rest of a record is without."""

SEPARATOR = b","
HASH_BYTES = 8

Tails = tuple[Sequence[bytes | None], Sequence[bytes | None]]
"""Packed ids of the replies, and their texts."""


class CallParts(NamedTuple):
    """The sequences of a call; None: it has none."""

    prompt: Bytes | None
    """Packed token ids."""
    replies: tuple[bytes | None, ...]
    """Packed token ids, one per choice."""
    messages: bytes | None
    """Canonical JSON of the request's messages, each followed by a comma: more messages make a longer text."""
    texts: tuple[bytes | None, ...]
    """The same of each reply."""
    tools: bytes | None
    others: bytes | None
    """Canonical JSON of the request without its messages."""


def parts_of(record: CompletionRecord) -> CallParts:
    """Of the request only messages and tools stay, of the response the replies: no trace shows more."""
    messages, tools, others = (None, None, None) if record.request is None else _request_parts(record.request)
    return CallParts(
        prompt=None if record.prompt_ids is None else _view(record.prompt_ids),
        replies=tuple(None if item.token_ids is None else item.token_ids.tobytes() for item in record.choices),
        messages=messages,
        texts=tuple(_reply_text(choice, record.response) for choice in record.choices),
        tools=tools,
        others=others,
    )


def _request_parts(text: bytes) -> tuple[bytes | None, bytes | None, bytes]:
    """Messages, tools, and all but the messages. The text holds the whole conversation, so it is parsed only once."""
    body = orjson.loads(text)
    request = body if isinstance(body, dict) else {}
    messages, tools = request.get("messages"), request.get("tools")
    tools_json = dump_json(tools) if tools else None
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        return None, tools_json, dump_json(body)
    others = {name: value for name, value in request.items() if name != "messages"}
    return text_of_messages(messages), tools_json, dump_json(others)


def _view(ids: npt.NDArray[np.int32]) -> Bytes:
    """The bytes of an array, without a copy."""
    return ids.data.cast("B") if len(ids) and ids.flags.c_contiguous else ids.tobytes()


def text_of_messages(messages: Sequence[Message]) -> bytes:
    """The text that `messages_of_text` reads.

    Fields that are null are left out, except ``content``: an engine writes them, a client that repeats the reply may
    not, and the two should be one text.
    """
    if not messages:
        return b""
    kept = [_without_nulls(message) if None in message.values() else message for message in messages]
    return dump_json(kept)[1:-1] + SEPARATOR


def _without_nulls(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def messages_of_text(text: bytes) -> tuple[Message, ...]:
    """The messages of a text made by `text_of_messages`."""
    found = parse_object(b'{"messages":[%s]}' % text[: -len(SEPARATOR)])
    return tuple(found["messages"]) if found else ()


def parse_object(text: bytes | None) -> dict[str, Any] | None:
    """The JSON object in ``text``; None where there is none."""
    if text is None:
        return None
    found = orjson.loads(text)
    return found if isinstance(found, dict) else None


def _reply_text(choice: SampledChoice, response: bytes | None) -> bytes | None:
    """The reply's message; from the response body where the choice itself has none."""
    if choice.message is not None:
        message = parse_object(choice.message)
    else:
        message = None if response is None else _message_of_response(choice.index, response)
    return None if message is None else text_of_messages((message,))


def _message_of_response(index: int, response: bytes) -> Message | None:
    found = (parse_object(response) or {}).get("choices")
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    messages = (item.get("message") for item in items if item.get("index", 0) == index)
    return next((item for item in messages if isinstance(item, dict)), None)


def pack_rest(record: CompletionRecord) -> bytes:
    """A record without its sequences, its id, and the fields that have their default values."""
    default, default_choice = _defaults()
    whole = record.model_dump(mode="python", exclude=SEQUENCE_FIELDS)
    choices = [_changed(choice, default_choice) for choice in whole["choices"]]
    packed: bytes = msgpack.packb({**_changed(whole, default), "choices": choices})
    return packed


def unpack_rest(rest: bytes, identity: Mapping[str, Any], tails: Tails) -> CompletionRecord:
    """The record again, with its replies; prompt and request stay out.

    ``identity``: session, attempt and completion id. ``tails``: packed ids and texts of the replies.
    """
    data = msgpack.unpackb(rest)
    replies, _ = tails
    # Earlier releases left out the only choice of a record where it had nothing but default values.
    data["choices"] = data["choices"] or [{} for _ in replies]
    for choice, reply, text in zip(data["choices"], *tails, strict=True):
        choice["token_ids"] = reply
        choice["message"] = None if text is None else text[: -len(SEPARATOR)]
    return CompletionRecord.model_validate({**data, **identity})


@cache
def _defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a record and of a choice where nothing was set."""
    record = CompletionRecord(session_id="s", completion_id="c", choices=(SampledChoice(),))
    data = record.model_dump(mode="python", exclude=SEQUENCE_FIELDS)
    return data, data["choices"][0]


def _changed(fields: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in default or value != default[name]}


def id_hash(completion_id: str) -> bytes:
    return hashlib.blake2b(completion_id.encode(), digest_size=HASH_BYTES).digest()


def content_digest(record: Record) -> bytes:
    """Digest of what this release knows of a record's content, however it was encoded (rule C7).

    Neither unknown fields count nor what an encoding leaves out: an older and a newer client may send the same record.
    Raises PoisonRecordError ``invalid``.
    """
    with _json_errors_as_poison():
        return hashlib.blake2b(_canonical(record), digest_size=16).digest()


def call_digest(record: CompletionRecord) -> tuple[bytes, CallParts]:
    """The same for a call, and its parts. Raises PoisonRecordError ``invalid``."""
    with _json_errors_as_poison():
        parts = parts_of(record)
        digest = hashlib.blake2b(_canonical(record.model_copy(update={"request": None})), digest_size=16)
        for part in (parts.others, parts.messages):
            digest.update(_length_prefixed(b"none", b"") if part is None else _length_prefixed(b"some", part))
        return digest.digest(), parts


@contextmanager
def _json_errors_as_poison() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise PoisonRecordError("invalid", f"the record holds what JSON cannot represent: {error}") from error


def _canonical(value: Any) -> bytes:
    if isinstance(value, Record):
        orjson.dumps(value.model_extra, default=_text_of_bytes)  # refuses what JSON cannot represent
        known = ((name, info, getattr(value, name)) for name, info in type(value).model_fields.items())
        return b"".join(
            _length_prefixed(name.encode(), _canonical(item))
            for name, info, item in known
            if info.exclude_if is None or not info.exclude_if(item)
        )
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, bytes):
        return dump_json(orjson.loads(value))
    if isinstance(value, tuple):
        return b"".join(_length_prefixed(b"", _canonical(item)) for item in value)
    return dump_json(value)


def _text_of_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _length_prefixed(name: bytes, content: bytes) -> bytes:
    return b"%s %d:%s" % (name, len(content), content)
