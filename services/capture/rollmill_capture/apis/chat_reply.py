"""A chat reply as the other APIs retell it: what each chunk adds, and what there is so far. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollmill_capture.upstream.formats.chat import choices_of, index_of
from rollmill_capture.upstream.formats.tool_calls import CallPiece, CallsSoFar

REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class Piece:
    """What one chunk adds to the first choice."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str
    """Byte for byte as the engine wrote it."""


@dataclass
class ReplySoFar:
    """The first choice of a reply, from chunks of a stream or of `replayed`."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: CallsSoFar = field(default_factory=CallsSoFar)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    begun: bool = False
    """The first chunk of the choice has come."""
    made_up: dict[int, str] = field(default_factory=dict)
    """Ids for calls that the engine gave none."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    def tool_calls(self) -> list[ToolCall]:
        found = enumerate(self.calls.whole())
        return [
            ToolCall(call["id"] or self.call_id(place), call["function"]["name"], call["function"]["arguments"])
            for place, call in found
        ]

    def call_id(self, place: int) -> str:
        return self.made_up.setdefault(place, f"call_{uuid.uuid4().hex[:24]}")

    def add(self, chunk: dict[str, Any]) -> Piece:
        self._count(chunk)
        choice = next((choice for choice in choices_of(chunk) if index_of(choice) == 0), None)
        if choice is None:
            return Piece()
        self.begun = True
        self._end(choice)
        delta = choice.get("delta")
        piece = _piece(delta, self.calls) if isinstance(delta, dict) else Piece()
        self.texts += [piece.text] if piece.text else []
        self.reasonings += [piece.reasoning] if piece.reasoning else []
        return piece

    def _count(self, chunk: dict[str, Any]) -> None:
        ids = chunk.get("prompt_token_ids")
        if isinstance(ids, list):
            self.prompt_tokens = len(ids)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _number(usage.get("prompt_tokens")) or self.prompt_tokens
            self.completion_tokens = _number(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            self.cached_tokens = _number(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def _end(self, choice: dict[str, Any]) -> None:
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
            stop = choice.get("stop_reason", choice.get("matched_stop"))
            self.stop_reason = stop if isinstance(stop, (int, str)) else None

    def message(self) -> dict[str, Any]:
        """The reply as a message of a later request's history."""
        calls = [(call.call_id, call.name, call.arguments) for call in self.tool_calls()]
        return assistant_message(self.text, self.reasoning, calls)


def _piece(delta: dict[str, Any], calls: CallsSoFar) -> Piece:
    reasoning = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
    text = delta.get("content") or delta.get("refusal")
    pieces = delta.get("tool_calls")
    return Piece(
        reasoning=reasoning,
        text=text if isinstance(text, str) else "",
        calls=tuple(calls.add(pieces)) if isinstance(pieces, list) else (),
    )


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def assistant_message(text: str, reasoning: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """An assistant's turn as chat completions want it in a history. ``calls``: id, name, arguments.

    Thoughts are said by both names that engines know for them: who drops one shortens the prompt without a word.
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


def replayed(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
            yield {name: [{"index": place, **call} for place, call in enumerate(value) if isinstance(call, dict)]}
        elif name != "role" and value not in (None, ""):
            yield {name: value}
