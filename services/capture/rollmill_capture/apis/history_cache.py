"""What capture remembers of its own replies, so that histories come back as they were sampled.

Anthropic Messages and Gemini carry the arguments of a tool call as an object: what a client sends back has lost the
spacing and the escapes that were sampled. The text is looked up by the call's id, or by its name and content. A request
to OpenAI Responses may name a response in place of its history. All of it is a cache of one replica: arguments that
were evicted are serialized anew, and a response that was evicted is refused.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import orjson

Messages = tuple[dict[str, Any], ...]

DEFAULT_BYTES = 256 * 2**20
OVERHEAD = 600
"""Bytes that an entry takes beside its own: keys, tuples, tables."""


@dataclass(frozen=True)
class _Link:
    """A response: the messages since the previous response, and that one's id."""

    previous: str | None
    messages: bytes
    """As JSON: a tenth of what the objects would take."""


class HistoryCache:
    """The least recently used entries are evicted, beyond ``max_bytes``."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._entries: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()

    def put(self, session_id: str, key: str, value: Any, size: int) -> None:
        size += OVERHEAD
        _, replaced = self._entries.pop((session_id, key), (None, 0))
        self._entries[session_id, key] = (value, size)
        self._used += size - replaced
        while self._used > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._used -= freed

    def get(self, session_id: str, key: str) -> Any:
        """None: unknown, or evicted."""
        found = self._entries.get((session_id, key))
        if found is None:
            return None
        self._entries.move_to_end((session_id, key))
        return found[0]


@dataclass(frozen=True)
class SessionHistory:
    """The entries of one session."""

    cache: HistoryCache = field(default_factory=HistoryCache)
    session_id: str = ""

    def remember_call(self, call_id: str, name: str, arguments: str) -> None:
        """Keep the sampled text of a call's arguments."""
        for key in (f"call {call_id}", f"call {name} {_canonical(_parsed(arguments))}"):
            self.cache.put(self.session_id, key, arguments, len(arguments) + len(key))

    def sampled_arguments(self, call_id: str | None, name: str, given: Any) -> str:
        """The sampled text of a call's arguments, which a client gives as the object ``given``."""
        by_id = self.cache.get(self.session_id, f"call {call_id}") if call_id else None
        if isinstance(by_id, str) and _same(by_id, given):
            return by_id
        by_content = self.cache.get(self.session_id, f"call {name} {_canonical(given)}")
        return by_content if isinstance(by_content, str) else _serialized(given)

    def remember_response(self, response_id: str, previous: str | None, messages: Messages) -> None:
        link = _Link(previous, compact_copy(orjson.dumps(messages)))
        self.cache.put(self.session_id, f"response {response_id}", link, len(link.messages))

    def messages_until(self, response_id: str) -> Messages | None:
        """All messages up to a response and with it; None: unknown, or evicted in part."""
        links: list[_Link] = []
        wanted: str | None = response_id
        while wanted is not None:
            link = self.cache.get(self.session_id, f"response {wanted}")
            if not isinstance(link, _Link):
                return None
            links.append(link)
            wanted = link.previous
        return tuple(message for link in reversed(links) for message in orjson.loads(link.messages))


INVALID = "INVALID_JSON"
"""The one key of an object in place of arguments that are no JSON object."""


def as_object(arguments: str) -> dict[str, Any]:
    """Sampled arguments as the object that Anthropic Messages and Gemini carry."""
    found = _parsed(arguments)
    return found if isinstance(found, dict) else {INVALID: arguments}


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {INVALID: arguments}


def _same(arguments: str, given: Any) -> bool:
    return bool(as_object(arguments) == given)


def _canonical(given: Any) -> str:
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode()


def _serialized(given: Any) -> str:
    """As most models write JSON: a space after every comma and colon."""
    if isinstance(given, dict) and list(given) == [INVALID] and isinstance(given[INVALID], str):
        return str(given[INVALID])
    return json_text(given)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def compact_copy(raw: bytes) -> bytes:
    """The same bytes in just the room that they take, for what is kept: what orjson returns holds on to all the room
    that it had set aside, several times the text.
    """
    return bytes(memoryview(raw))
