"""What the formats without token ids come down to: one reply, with its message as chat completions have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmill_capture.upstream.formats.parsed_reply import Incomplete, ParsedChoice, ParsedReply


@dataclass
class ReplyItems:
    """A reply of one choice, gathered item by item."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By their position in the reply."""
    usage: tuple[int, int] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    model: str | None = None

    def begin_call(self, position: int, call_id: Any, name: Any, arguments: str = "") -> None:
        self.calls[position] = {
            "id": call_id,
            "type": "function",
            "function": {"name": name if isinstance(name, str) else "", "arguments": arguments},
        }

    def add_arguments(self, position: int, piece: Any) -> None:
        if position in self.calls and isinstance(piece, str):
            self.calls[position]["function"]["arguments"] += piece

    def add_usage(self, usage: Any) -> None:
        """Later counts replace earlier ones, each on its own."""
        if not isinstance(usage, dict):
            return
        before = self.usage or (0, 0)
        given = (usage.get("input_tokens"), usage.get("output_tokens"))
        new = [count if type(count) is int and count >= 0 else old for count, old in zip(given, before, strict=True)]
        self.usage = (new[0], new[1])

    def parsed(self, incomplete: Incomplete | None, error: str | None = None) -> ParsedReply:
        choice = ParsedChoice(
            index=0, message=self._message(), finish_reason=self.finish_reason, stop_reason=self.stop_reason
        )
        return ParsedReply(choices=(choice,), usage=self.usage, model=self.model, incomplete=incomplete, error=error)

    def _message(self) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts) or None}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return orjson.dumps(message)
