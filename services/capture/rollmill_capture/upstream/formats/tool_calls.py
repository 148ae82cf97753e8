"""The tool calls of a streamed reply, put together from pieces that servers number in their own ways. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class CallPiece:
    """One piece, with the number of the call it belongs to, counted from 0 in the order in which calls began."""

    number: int
    begins: bool
    call_id: str | None
    name: str
    """Of the call so far."""
    arguments: str
    """This piece's own."""


class CallsSoFar:
    """Calls by the server's index, and within one index by the start of a new call.

    Some servers give every parallel call index 0, and say a new id and a new name where a call begins; others repeat
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

    def add(self, pieces: list[Any]) -> Iterator[CallPiece]:
        """What ``pieces``, the ``tool_calls`` of one delta, say. Must be read to its end."""
        for position, piece in enumerate(pieces):
            if isinstance(piece, dict):
                index = piece.get("index")
                yield self._add(index if type(index) is int else position, piece)

    def _add(self, index: int, piece: dict[str, Any]) -> CallPiece:
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
        return CallPiece(number, begins, call["id"], call["function"]["name"], arguments)

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
