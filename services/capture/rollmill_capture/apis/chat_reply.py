"""A chat reply for the formatters of other APIs: what each chunk adds, and what there is so far. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollmill_capture.upstream.formats.chat import choices_of, index_of
from rollmill_capture.upstream.formats.chat_stream import ToolCallAssembler, ToolCallDelta

REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class ReplyDelta:
    """What one chunk adds to the first choice."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str
    """Byte for byte as the engine wrote it."""


@dataclass
class PartialReply:
    """The first choice of a reply, from the chunks of a stream, or from `as_chunks`."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: ToolCallAssembler = field(default_factory=ToolCallAssembler)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    started: bool = False
    """The first chunk of the choice has come."""
    generated_ids: dict[int, str] = field(default_factory=dict)
    """By the number of a call that the engine gave no id."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(call["id"] or self.call_id(number), call["function"]["name"], call["function"]["arguments"])
            for number, call in enumerate(self.calls.whole())
        ]

    def call_id(self, number: int) -> str:
        """An id of our own for a call without one; the same for each chunk."""
        return self.generated_ids.setdefault(number, f"call_{uuid.uuid4().hex[:24]}")

    def add(self, chunk: dict[str, Any]) -> ReplyDelta:
        self._add_usage(chunk)
        choice = next((choice for choice in choices_of(chunk) if index_of(choice) == 0), None)
        if choice is None:
            return ReplyDelta()
        self.started = True
        self._add_end(choice)
        delta = choice.get("delta")
        added = _delta(delta, self.calls) if isinstance(delta, dict) else ReplyDelta()
        self.texts += [added.text] if added.text else []
        self.reasonings += [added.reasoning] if added.reasoning else []
        return added

    def _add_usage(self, chunk: dict[str, Any]) -> None:
        ids = chunk.get("prompt_token_ids")
        if isinstance(ids, list):
            self.prompt_tokens = len(ids)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _number(usage.get("prompt_tokens")) or self.prompt_tokens
            self.completion_tokens = _number(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            self.cached_tokens = _number(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def _add_end(self, choice: dict[str, Any]) -> None:
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
            stop = choice.get("stop_reason", choice.get("matched_stop"))
            self.stop_reason = stop if isinstance(stop, (int, str)) else None

    def message(self) -> dict[str, Any]:
        """The reply as a message of a later request's history."""
        calls = [(call.call_id, call.name, call.arguments) for call in self.tool_calls()]
        return assistant_message(self.text, self.reasoning, calls)


def _delta(delta: dict[str, Any], calls: ToolCallAssembler) -> ReplyDelta:
    reasoning = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
    text = delta.get("content") or delta.get("refusal")
    pieces = delta.get("tool_calls")
    return ReplyDelta(
        reasoning=reasoning,
        text=text if isinstance(text, str) else "",
        calls=tuple(calls.add(pieces)) if isinstance(pieces, list) else (),
    )


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def assistant_message(text: str, reasoning: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """An assistant's turn as chat completions want it in a history. ``calls``: id, name, arguments.

    Thoughts are given under both names that engines know for them: an engine that does not find them renders a shorter
    prompt without an error.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    message.update(dict.fromkeys(REASONING, reasoning) if reasoning else {})
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    elif not text:
        message["content"] = ""
    return message


def as_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole chat answer as the chunks of a stream: for each choice its role, its content and its end, then usage."""
    head = {name: value for name, value in body.items() if name not in ("choices", "usage", "object")}
    head["object"] = "chat.completion.chunk"
    for choice in choices_of(body):
        index, rest = index_of(choice), {name: value for name, value in choice.items() if name != "message"}
        message = choice.get("message")
        for delta in _deltas(message if isinstance(message, dict) else {}):
            yield {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        yield {**head, "choices": [{**rest, "index": index, "delta": {}}]}
    yield {**head, "choices": [], "usage": body.get("usage")}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": message.get("role") or "assistant", "content": ""}
    for name, value in message.items():
        if name == "tool_calls" and isinstance(value, list):
            yield {name: [{"index": position, **call} for position, call in enumerate(value) if isinstance(call, dict)]}
        elif name != "role" and value not in (None, ""):
            yield {name: value}
