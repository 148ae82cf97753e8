"""Reads reasoning and tool calls from plain text, so that a chat reply can go on as a completion. Pure.

A completion has no parser behind it, so the text of all that was sampled is parsed here, in the form that most open
models write it: ``<think>…</think>`` in front, ``<tool_call>{"name": …, "arguments": …}</tool_call>`` behind. What the
client has got is never taken back: where the parsed text differs from it, the reply cannot be continued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.errors import RollmillError

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_REASONING = ("reasoning_content", "reasoning")


class CannotContinueError(RollmillError):
    """The reply ends where the engine broke it off."""


@dataclass(frozen=True)
class ParsedText:
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments, as sampled."""


def read_text(text: str, *, thinks: bool, tools: bool, final: bool) -> ParsedText:
    """What is in a text so far. An end that may be the beginning of a marker waits, unless it is ``final``; so does a
    call that is not whole. Raises CannotContinueError.
    """
    reasoning = ""
    if text.lstrip().startswith(THINK):
        text, thinks = text.lstrip().removeprefix(THINK), True
    elif not (thinks or final) and THINK.startswith(text.lstrip()):
        return ParsedText()
    if thinks:
        reasoning, end, text = text.partition(THOUGHT)
        if not end:
            return ParsedText(_without_partial_marker(reasoning, THOUGHT, final=final))
    if not tools:
        return ParsedText(reasoning, text)
    content, begins, rest = text.partition(CALL)
    if not begins:
        return ParsedText(reasoning, _without_partial_marker(content, CALL, final=final))
    pieces = [piece.partition(CALLED) for piece in rest.split(CALL)]
    return ParsedText(reasoning, content, tuple(_call(body) for body, ended, _ in pieces if ended))


def _without_partial_marker(text: str, marker: str, *, final: bool) -> str:
    """Without an end that may become the marker."""
    if final:
        return text
    held = next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - held]


def _call(body: str) -> tuple[str, str]:
    try:
        call = orjson.loads(body)
        name, given = str(call["name"]), call["arguments"]
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        raise CannotContinueError("a tool call of the reply is not in the form that can be read") from error
    for found in _ARGUMENTS.finditer(body):
        raw = body[found.end() :].rstrip().removesuffix("}").rstrip()
        if _is(raw, given):
            return name, raw
    return name, orjson.dumps(given).decode()


def _is(raw: str, given: object) -> bool:
    try:
        return bool(orjson.loads(raw) == given)
    except orjson.JSONDecodeError:
        return False


class ReasoningAndToolParser:
    """``raw``: the text of all that was sampled; ``message``: what the client has of it, as a chat's message."""

    def __init__(self, raw: str, message: Mapping[str, Any], *, tools: bool, name: str) -> None:
        self._raw = raw
        self._tools = tools
        self._name = name
        self._field = next((field for field in _REASONING if message.get(field)), _REASONING[0])
        self._reasoning = str(message.get(self._field) or "")
        self._content = str(message.get("content") or "")
        self.calls: list[dict[str, Any]] = [_copied(call) for call in message.get("tool_calls") or ()]

    def feed(self, text: str, *, final: bool) -> dict[str, Any]:
        """What ``text``, the next that was sampled, adds, as a chat's delta. Raises CannotContinueError."""
        self._raw += text
        parsed = read_text(self._raw, thinks=bool(self._reasoning), tools=self._tools, final=final)
        reasoning, content = _added(parsed.reasoning, self._reasoning), _added(parsed.content, self._content)
        self._reasoning, self._content = self._reasoning + reasoning, self._content + content
        calls = [piece for place, call in enumerate(parsed.calls) for piece in self._call_deltas(place, *call)]
        parts = {self._field: reasoning, "content": content, "tool_calls": calls}
        return {field: part for field, part in parts.items() if part}

    def message(self) -> dict[str, Any]:
        """All that the client has by now, as fields of a message."""
        parts = {self._field: self._reasoning, "tool_calls": self.calls}
        return {"content": self._content or None, **{field: part for field, part in parts.items() if part}}

    def _call_deltas(self, place: int, name: str, arguments: str) -> list[dict[str, Any]]:
        if place == len(self.calls):
            function = {"name": name, "arguments": arguments}
            self.calls.append({"id": f"call_{self._name}_{place}", "type": "function", "function": function})
            return [{"index": place, **_copied(self.calls[place])}]
        function = self.calls[place]["function"]
        if function["name"] not in ("", name):
            raise CannotContinueError("a tool call differs from what the client already has")
        added = _added(arguments, function["arguments"])
        function["arguments"] += added
        return [{"index": place, "function": {"arguments": added}}] if added else []


def _copied(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {"name": "", "arguments": "", **(call.get("function") or {})}}


def _added(now: str, sent: str) -> str:
    """The end of ``now`` that the client has not got. Engines leave out white space in front."""
    for text in (now, now.lstrip()):
        if text.startswith(sent):
            return text[len(sent) :]
        if sent.startswith(text):
            return ""
    raise CannotContinueError("the reply differs from what the client already has")
