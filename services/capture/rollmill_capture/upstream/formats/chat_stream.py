"""A streamed chat completion, or completion, put together chunk by chunk: the same reading as of the whole body."""

from __future__ import annotations

from collections import deque
from typing import Any

import orjson

from rollmill_capture.upstream.formats.chat import ChoiceSoFar, RootSoFar, choices_of, index_of
from rollmill_capture.upstream.formats.parsed_reply import Ids, Incomplete, ParsedReply
from rollmill_capture.upstream.formats.stream import Assembler
from rollmill_capture.upstream.formats.tool_calls import CallsSoFar

TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
"""Fields of a delta whose pieces are joined."""


class ChatAssembler(Assembler):
    """Gathers the chunks of one stream. ``expected`` is the number of choices the request asked for; ``prompt_ids`` is
    the prompt where the request gave it as ids.
    """

    def __init__(self, expected: int = 1, prompt_ids: Ids | None = None) -> None:
        super().__init__()
        self._expected = expected
        self._root = RootSoFar(sent=prompt_ids)
        self._choices: dict[int, ChoiceSoFar] = {}
        self._messages: dict[int, MessageSoFar] = {}

    def _add(self, chunk: dict[str, Any]) -> None:
        pieces = choices_of(chunk)
        self._root.add(chunk, pieces)
        for piece in pieces:
            index = index_of(piece)
            self._choices.setdefault(index, ChoiceSoFar(index)).add(piece)
            delta = piece.get("delta")
            if isinstance(delta, dict):
                self._messages.setdefault(index, MessageSoFar()).add(delta)
            elif isinstance(piece.get("text"), str):
                self._messages.setdefault(index, MessageSoFar()).add({"content": piece["text"]})

    @property
    def finished(self) -> bool:
        ends = [choice.finish_reason is not None for choice in self._choices.values()]
        return len(ends) >= self._expected and all(ends)

    def _reading(self, why: Incomplete | None, error: str | None) -> ParsedReply:
        choices = (choice.reading(self._message(index)) for index, choice in sorted(self._choices.items()))
        return self._root.reading(tuple(choices), why, error)

    def _message(self, index: int) -> bytes:
        return orjson.dumps(self._messages.get(index, MessageSoFar()).whole())


class MessageSoFar:
    """The assistant message of one choice, from its deltas; of a completion, from its texts."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls = CallsSoFar()
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
