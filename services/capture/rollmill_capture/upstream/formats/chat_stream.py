"""A streamed chat completion, or completion, put together chunk by chunk: the same reply as from the whole body. Pure.

Servers number the pieces of tool calls in their own ways; `ToolCallAssembler` finds which call a piece belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill_capture.upstream.formats.chat import PartialChoice, PartialRoot, choices_of, index_of
from rollmill_capture.upstream.formats.parsed_reply import Ids, Incomplete, ParsedReply, StreamAssembler

TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
"""Fields of a delta that come in pieces, which are joined."""


class ChatAssembler(StreamAssembler):
    """Gathers the chunks of one stream. ``expected`` is the number of choices the request asked for; ``prompt_ids`` is
    the prompt where the request gave it as ids.
    """

    def __init__(self, expected: int = 1, prompt_ids: Ids | None = None) -> None:
        super().__init__()
        self._expected = expected
        self._root = PartialRoot(sent=prompt_ids)
        self._choices: dict[int, PartialChoice] = {}
        self._messages: dict[int, PartialMessage] = {}

    def _add(self, chunk: dict[str, Any]) -> None:
        pieces = choices_of(chunk)
        self._root.add(chunk, pieces)
        for piece in pieces:
            index = index_of(piece)
            self._choices.setdefault(index, PartialChoice(index)).add(piece)
            delta = piece.get("delta")
            if isinstance(delta, dict):
                self._messages.setdefault(index, PartialMessage()).add(delta)
            elif isinstance(piece.get("text"), str):
                self._messages.setdefault(index, PartialMessage()).add({"content": piece["text"]})

    @property
    def finished(self) -> bool:
        ends = [choice.finish_reason is not None for choice in self._choices.values()]
        return len(ends) >= self._expected and all(ends)

    def _parsed(self, why: Incomplete | None, error: str | None) -> ParsedReply:
        choices = (choice.parsed(self._message(index)) for index, choice in sorted(self._choices.items()))
        return self._root.parsed(tuple(choices), why, error)

    def _message(self, index: int) -> bytes:
        return orjson.dumps(self._messages.get(index, PartialMessage()).whole())


class PartialMessage:
    """The assistant message of one choice, from its deltas; of a completion, from its texts."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls = ToolCallAssembler()
        self._others: dict[str, Any] = {}

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name in TEXTS and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif name == "tool_calls" and isinstance(value, list):
                deque(self._calls.add(value), maxlen=0)
            elif value is not None:
                self._others[name] = value

    def whole(self) -> dict[str, Any]:
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        calls = {"tool_calls": self._calls.whole()} if self._calls else {}
        return {"role": "assistant", "content": None, **self._others, **texts, **calls}


@dataclass(frozen=True)
class ToolCallDelta:
    """One piece of a tool call."""

    number: int
    """Of the call it belongs to, counted from 0 in the order in which calls began."""
    begins: bool
    call_id: str | None
    name: str
    """Of the call so far."""
    arguments: str
    """This piece's own."""


class ToolCallAssembler:
    """Calls by the server's index, and within one index by the start of a new call.

    Some servers give every parallel call index 0, and send a new id and a new name where a call begins; others repeat
    ids, or send a new one with every piece of arguments, but then without a name.
    """

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._current: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def whole(self) -> list[dict[str, Any]]:
        """The calls by the server's index, those of one index as they began."""
        order = sorted(range(len(self._calls)), key=lambda number: (self._calls[number]["index"], number))
        return [{key: self._calls[number][key] for key in ("id", "type", "function")} for number in order]

    def add(self, pieces: list[Any]) -> Iterator[ToolCallDelta]:
        """The deltas in ``pieces``, the ``tool_calls`` of one chunk's delta. The iterator must be read to its end."""
        for position, piece in enumerate(pieces):
            if isinstance(piece, dict):
                index = piece.get("index")
                yield self._add(index if type(index) is int else position, piece)

    def _add(self, index: int, piece: dict[str, Any]) -> ToolCallDelta:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        begins = self._begins(index, piece.get("id"), function.get("name"))
        if begins:
            self._current[index] = len(self._calls)
            self._calls.append(_new_call(index))
        number = self._current[index]
        arguments = _text(function.get("arguments"))
        _extend(self._calls[number], piece, function.get("name"), arguments)
        call = self._calls[number]
        return ToolCallDelta(number, begins, call["id"], call["function"]["name"], arguments)

    def _begins(self, index: int, call_id: Any, name: Any) -> bool:
        if index not in self._current:
            return True
        call = self._calls[self._current[index]]
        return bool(call_id and name and call["function"]["name"] and call["id"] and call_id != call["id"])


def _text(arguments: Any) -> str:
    """Some servers give arguments as an object, whole."""
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    return arguments if isinstance(arguments, str) else ""


def _new_call(index: int) -> dict[str, Any]:
    return {"index": index, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}


def _extend(call: dict[str, Any], piece: dict[str, Any], name: Any, arguments: str) -> None:
    call["id"] = call["id"] or piece.get("id")
    call["type"] = piece.get("type") or call["type"]
    call["function"]["name"] = call["function"]["name"] or name or ""
    call["function"]["arguments"] += arguments
