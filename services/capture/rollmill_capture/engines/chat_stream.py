"""A streamed chat completion, put together chunk by chunk: the same reading as of the whole body."""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.engines.chat import ChoiceSoFar, RootSoFar, choices_of, error_of, index_of
from rollmill_capture.engines.reading import Incomplete, Reading

TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
"""Fields of a delta whose pieces are joined."""


class ChatAssembler:
    """Gathers the chunks of one stream. ``expected`` is the number of choices the request asked for."""

    def __init__(self, expected: int = 1) -> None:
        self._expected = expected
        self._root = RootSoFar()
        self._choices: dict[int, ChoiceSoFar] = {}
        self._messages: dict[int, MessageSoFar] = {}
        self._failure: tuple[Incomplete, str | None] | None = None
        self._chunks = 0

    def add(self, chunk: Any) -> None:
        """One parsed ``data`` of the stream."""
        error = error_of(chunk)
        if error is not None:
            self.fail("error_frame", error)
        elif isinstance(chunk, dict):
            self._add(chunk)
        else:
            self.fail("bad_frame", "a frame of the stream is no JSON object")

    def _add(self, chunk: dict[str, Any]) -> None:
        self._chunks += 1
        self._root.add(chunk)
        for piece in choices_of(chunk):
            index = index_of(piece)
            self._choices.setdefault(index, ChoiceSoFar(index)).add(piece)
            delta = piece.get("delta")
            if isinstance(delta, dict):
                self._messages.setdefault(index, MessageSoFar()).add(delta)

    def fail(self, why: Incomplete, message: str | None) -> None:
        """Nothing that comes later makes this a whole reply; the first reason stays."""
        self._failure = self._failure or (why, message)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def finished(self) -> bool:
        """Every choice that was asked for has its finish reason."""
        ends = [choice.finish_reason is not None for choice in self._choices.values()]
        return len(ends) >= self._expected and all(ends)

    def reading(self) -> Reading:
        """What the stream has said, taken as ended here."""
        why, error = self._failure or (self._unfinished(), None)
        choices = (choice.reading(self._message(index)) for index, choice in sorted(self._choices.items()))
        return self._root.reading(tuple(choices), why, error)

    def _unfinished(self) -> Incomplete | None:
        if self.finished:
            return None
        return "no_terminal_frame" if self._chunks else "not_sse"

    def _message(self, index: int) -> bytes:
        return orjson.dumps(self._messages.get(index, MessageSoFar()).whole())


class MessageSoFar:
    """The assistant message of one choice, from its deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._others: dict[str, Any] = {}

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name in TEXTS and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif name == "tool_calls" and isinstance(value, list):
                self._add_calls(value)
            elif value is not None:
                self._others[name] = value

    def _add_calls(self, pieces: list[Any]) -> None:
        for position, piece in enumerate(pieces):
            if isinstance(piece, dict):
                # By index alone: some servers send a new id, or a null one, with every piece of one call.
                index = piece.get("index")
                _add_call(self._calls.setdefault(index if type(index) is int else position, _new_call()), piece)

    def whole(self) -> dict[str, Any]:
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        calls = {"tool_calls": [call for _, call in sorted(self._calls.items())]} if self._calls else {}
        return {"role": "assistant", "content": None, **self._others, **texts, **calls}


def _new_call() -> dict[str, Any]:
    return {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}


def _add_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    call["id"] = call["id"] or piece.get("id")
    call["type"] = piece.get("type") or call["type"]
    function = piece.get("function")
    if isinstance(function, dict):
        call["function"]["name"] = call["function"]["name"] or function.get("name") or ""
        arguments = function.get("arguments")
        call["function"]["arguments"] += arguments if isinstance(arguments, str) else ""
