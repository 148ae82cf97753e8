"""A call taken apart: token ids and texts, which repeat from call to call, and the rest, which is small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import orjson

from rollmill.models import CompletionRecord, SampledChoice, dump_json
from rollmill_builder.storage.buffer import Bytes
from rollmill_builder.storage.chat_messages import Message, messages_of, parse_object, tools_of

APART: dict[str, Any] = {
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

Tails = tuple[Sequence[bytes | None], Sequence[bytes | None]]
"""Packed ids of the replies, and their texts."""


class Parts(NamedTuple):
    """What a call's sequences are; None: it has none."""

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


def parts_of(record: CompletionRecord) -> Parts:
    """Of the request only messages and tools stay, of the response the replies: no trace shows more."""
    messages, tools, others = (None, None, None) if record.request is None else _request(record.request)
    return Parts(
        prompt=None if record.prompt_ids is None else _view(record.prompt_ids),
        replies=tuple(None if item.token_ids is None else item.token_ids.tobytes() for item in record.choices),
        messages=messages,
        texts=tuple(_text(choice, record.response) for choice in record.choices),
        tools=tools,
        others=others,
    )


def _request(text: bytes) -> tuple[bytes | None, bytes | None, bytes]:
    """Messages, tools, and all but the messages. The text is parsed once: it is as long as all that was said."""
    body = orjson.loads(text)
    request = body if isinstance(body, dict) else {}
    messages = messages_of(request)
    if messages is None:
        return None, tools_of(request), dump_json(body)
    others = {name: value for name, value in request.items() if name != "messages"}
    return text_of_messages(messages), tools_of(request), dump_json(others)


def _view(ids: npt.NDArray[np.int32]) -> Bytes:
    """The bytes of an array, without a copy."""
    return ids.data.cast("B") if len(ids) and ids.flags.c_contiguous else ids.tobytes()


def text_of_messages(messages: Sequence[Message]) -> bytes:
    """The text that `messages_of_text` reads.

    Fields that are null are left out, but the content: an engine says them, a client that repeats its reply may not,
    and the two should be one text.
    """
    if not messages:
        return b""
    told = [_told(message) if None in message.values() else message for message in messages]
    return dump_json(told)[1:-1] + SEPARATOR


def _told(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def messages_of_text(text: bytes) -> tuple[Message, ...]:
    """The messages of a text made by `text_of_messages`."""
    found = parse_object(b'{"messages":[%s]}' % text[: -len(SEPARATOR)])
    return tuple(found["messages"]) if found else ()


def _text(choice: SampledChoice, response: bytes | None) -> bytes | None:
    """The reply's message; from the response body where the choice itself has none."""
    if choice.message is not None:
        message = parse_object(choice.message)
    else:
        message = None if response is None else _answered(choice.index, response)
    return None if message is None else text_of_messages((message,))


def _answered(index: int, response: bytes) -> Message | None:
    found = (parse_object(response) or {}).get("choices")
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    messages = (item.get("message") for item in items if item.get("index", 0) == index)
    return next((item for item in messages if isinstance(item, dict)), None)


def pack_rest(record: CompletionRecord) -> bytes:
    """A record without its sequences, its id, and whatever is as it is by default."""
    usual, usual_choice = _usual()
    data = _unusual(record.model_dump(mode="python", exclude=APART), usual)
    data["choices"] = [_unusual(choice, usual_choice) for choice in data.get("choices", ())]
    packed: bytes = msgpack.packb(data)
    return packed


def unpack_rest(rest: bytes, identity: Mapping[str, Any], tails: Tails) -> CompletionRecord:
    """The record again, with its replies; prompt and request stay out.

    ``identity``: session, attempt and completion id. ``tails``: packed ids and texts of the replies.
    """
    data = msgpack.unpackb(rest)
    for choice, reply, text in zip(data["choices"], *tails, strict=True):
        choice["token_ids"] = reply
        choice["message"] = None if text is None else text[: -len(SEPARATOR)]
    return CompletionRecord.model_validate({**data, **identity})


@cache
def _usual() -> tuple[dict[str, Any], dict[str, Any]]:
    """What a record and a choice say if nothing was said."""
    record = CompletionRecord(session_id="s", completion_id="c", choices=(SampledChoice(),))
    data = record.model_dump(mode="python", exclude=APART)
    return data, data["choices"][0]


def _unusual(fields: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value != usual[name]}
