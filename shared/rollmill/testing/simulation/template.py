"""The chat template: messages to token ids, and a reply's ids to its message. Its flags: how real ones differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.testing.samples.sessions import Message
from rollmill.testing.simulation import tokens
from rollmill.testing.simulation.tokens import decode, encode

ROLES = {"system": tokens.SYSTEM, "user": tokens.USER, "assistant": tokens.ASSISTANT, "tool": tokens.TOOL}


@dataclass(frozen=True)
class Template:
    strips_thinking: bool = False
    """Reasoning is rendered only in turns after the last user message."""
    scaffold: bool = False
    """A generation prompt ends with an empty reasoning block, which history does not contain."""
    own_call_end: bool = False
    """A turn that calls tools ends with a special end token."""
    doubles_end: bool = False
    """History has the end-of-turn token twice after an assistant turn."""
    forgets_end: bool = False
    """History has no end-of-turn token after an assistant turn."""
    trims: bool = False
    """White space around a reply's text is removed in history: the text differs although the messages are equal."""
    rewrites_arguments: bool = False
    """History sorts the arguments of tools: the text differs, too."""

    @property
    def faithful(self) -> bool:
        """Whether history has the text of the messages."""
        return not (self.trims or self.rewrites_arguments)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The prompt's ids, ready for the model's turn."""
        ids = [tokens.BOS]
        if tools:
            ids += [tokens.TOOLS, *encode("".join(tool["function"]["name"] for tool in tools)), tokens.NEWLINE]
        last_user = max((at for at, item in enumerate(messages) if item["role"] == "user"), default=-1)
        for place, message in enumerate(messages):
            ids += [ROLES[message["role"]], *self._turn(message, thinks=place > last_user), tokens.NEWLINE]
        return [*ids, tokens.ASSISTANT, *([tokens.THINK, tokens.UNTHINK] if self.scaffold else [])]

    def end_of(self, message: Message) -> int:
        return tokens.END_OF_CALL if self.own_call_end and message.get("tool_calls") else tokens.END

    def _turn(self, message: Message, *, thinks: bool) -> list[int]:
        if message["role"] != "assistant":
            return [*encode(message["content"]), tokens.END]
        shown = thinks or not self.strips_thinking
        ends = 0 if self.forgets_end else 2 if self.doubles_end else 1
        return [*body(self._written(message), encode, thinks=shown), *[self.end_of(message)] * ends]

    def _written(self, message: Message) -> Message:
        if self.faithful:
            return message
        calls = [_sorted(call) if self.rewrites_arguments else call for call in message.get("tool_calls", ())]
        content = message["content"].strip() if self.trims else message["content"]
        return {**message, "content": content, "tool_calls": calls}


def body(message: Message, write: Any, *, thinks: bool = True) -> list[int]:
    """An assistant turn's ids without its end; ``write`` encodes text."""
    ids: list[int] = []
    if message.get("reasoning_content") and thinks:
        ids += [tokens.THINK, *write(message["reasoning_content"]), tokens.UNTHINK]
    ids += write(message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        ids += [tokens.CALL, *write(function["name"]), tokens.ARGUMENTS, *write(function["arguments"])]
    return ids


def parse(ids: Sequence[int]) -> Message:
    """The message of a reply's ids without their end, as an engine's parser makes it."""
    content, thought, calls = _parts(ids)
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [tool_call(name, arguments, at) for at, (name, arguments) in enumerate(calls)]
    return message


def tool_call(name: str, arguments: str, place: int = 0) -> Message:
    return {"id": f"t{place}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _sorted(call: Message) -> Message:
    function = call["function"]
    return {
        **call,
        "function": {**function, "arguments": "".join(sorted(re.findall(r"<\d+>|.", function["arguments"])))},
    }


def _parts(ids: Sequence[int]) -> tuple[str, str, list[tuple[str, str]]]:
    head, *rest = _split(ids, tokens.CALL)
    thought: list[int] = []
    if head[:1] == [tokens.THINK]:
        thought, *after = _split(head[1:], tokens.UNTHINK)
        head = [token for part in after for token in part]
    calls = []
    for part in rest:
        name, *arguments = _split(part, tokens.ARGUMENTS)
        calls.append((decode(name), decode(token for piece in arguments for token in piece)))
    return decode(head), decode(thought), calls


def _split(ids: Sequence[int], at: int) -> Iterator[list[int]]:
    part: list[int] = []
    for token in ids:
        if token == at:
            yield part
            part = []
        else:
            part.append(token)
    yield part
