"""Anthropic Messages, the reply: from chat completions, whole and as events. Pure.

Of several tool calls in a stream the first is told as it comes and the others at the end, because blocks must not
overlap and pieces of calls may.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.anthropic_request import chat_fields, stop_sequences
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.chat_reply import Piece, ReplySoFar, ToolCall, replayed
from rollmill_capture.apis.history_cache import SessionHistory, as_object
from rollmill_capture.apis.validation import is_stream
from rollmill_capture.errors import ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.tool_calls import CallPiece
from rollmill_capture.upstream.formats.upstream_format import CHAT

STOPS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""By finish reason; any other, an abort among them, is null."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class AnthropicErrorFormat:
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        del param
        kind = _ERRORS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def frame(self, status: int, message: str) -> bytes:
        return _event("error", self.error(status, message))


SHAPE = AnthropicErrorFormat()


@dataclass(frozen=True)
class AnthropicApi:
    name: str = "messages"
    shape: ErrorFormat = SHAPE

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place
        if type(body.get("max_tokens")) is not int:
            raise InvalidInputError("`max_tokens` must be a number")
        fields, ignored = chat_fields(body, memory)
        answer = AnthropicFormatter(str(body.get("model") or ""), stop_sequences(body), memory)
        return ParsedRequest(CHAT, fields, answer, is_stream(body), translated=True, ignored=tuple(ignored))


@dataclass(frozen=True)
class AnthropicFormatter:
    model: str
    stops: tuple[str, ...]
    memory: SessionHistory
    shape: ErrorFormat = SHAPE

    def voice(self) -> AnthropicStreamFormatter:
        return AnthropicStreamFormatter(self)

    def whole(self, raw: bytes, body: Any) -> bytes:
        del raw
        reply = ReplySoFar()
        for chunk in replayed(body):
            reply.add(chunk)
        self.remember(reply)
        content = [*_thinking(reply.reasoning), *_text(reply.text), *map(_tool_use, reply.tool_calls())]
        return orjson.dumps({**self.head(reply), "content": content, **self.ending(reply), "usage": _usage(reply)})

    def head(self, reply: ReplySoFar) -> dict[str, Any]:
        del reply
        return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self.model}

    def ending(self, reply: ReplySoFar) -> dict[str, Any]:
        stop = reply.stop_reason
        if reply.finish_reason == "stop" and isinstance(stop, str) and stop in self.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOPS.get(reply.finish_reason or ""), "stop_sequence": None}

    def remember(self, reply: ReplySoFar) -> None:
        for call in reply.tool_calls():
            self.memory.keep_call(call.call_id, call.name, call.arguments)


@dataclass
class AnthropicStreamFormatter:
    answer: AnthropicFormatter
    reply: ReplySoFar = field(default_factory=ReplySoFar)
    blocks: int = 0
    open: str | None = None
    """Kind of the block that is being told; a call's stays open to the end."""
    told: str | None = None
    """Id of the call that is told as it comes."""
    late: list[str] = field(default_factory=list)
    """Text that came after the first call had begun."""

    def chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        del event
        begins = not self.reply.begun
        piece = self.reply.add(chunk)
        return (self._begin() if begins and self.reply.begun else b"") + self._piece(piece)

    def end(self) -> bytes:
        reply, answer = self.reply, self.answer
        answer.remember(reply)
        waiting = [call for call in reply.tool_calls() if call.call_id != self.told]
        late = self._delta("text", {"type": "text", "text": ""}, "".join(self.late)) if self.late else b""
        frames = [b"" if reply.begun else self._begin(), late, self._close(), *map(self._call, waiting)]
        delta = {"type": "message_delta", "delta": answer.ending(reply), "usage": _usage(reply)}
        return b"".join([*frames, _event("message_delta", delta), _event("message_stop", {"type": "message_stop"})])

    def _begin(self) -> bytes:
        usage = {**_usage(self.reply), "output_tokens": 0}
        message = {**self.answer.head(self.reply), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"type": "message_start", "message": {**message, "usage": usage}})

    def _piece(self, piece: Piece) -> bytes:
        frames = b""
        if piece.reasoning and self.told is None:
            frames += self._delta("thinking", {"type": "thinking", "thinking": "", "signature": ""}, piece.reasoning)
        if piece.text and self.told is None:
            frames += self._delta("text", {"type": "text", "text": ""}, piece.text)
        elif piece.text:
            self.late.append(piece.text)
        return frames + b"".join(self._live(call) for call in piece.calls if call.number == 0)

    def _live(self, call: CallPiece) -> bytes:
        self.told = self.told or call.call_id or self.reply.call_id(0)
        block = {"type": "tool_use", "id": self.told, "name": call.name, "input": {}}
        return self._delta("tool_use", block, call.arguments)

    def _delta(self, kind: str, block: dict[str, Any], text: str) -> bytes:
        frames = b"" if self.open == kind else self._close() + self._start(kind, block)
        names = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
        types = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
        return frames + self._said({"type": types[kind], names[kind]: text}) if text else frames

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self.open = kind
        start = {"type": "content_block_start", "index": self.blocks, "content_block": block}
        return _event("content_block_start", start)

    def _said(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"type": "content_block_delta", "index": self.blocks, "delta": delta})

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        signature = _signature(self.reply.reasoning)
        signed = self._said({"type": "signature_delta", "signature": signature}) if self.open == "thinking" else b""
        self.open = None
        self.blocks += 1
        return signed + _event("content_block_stop", {"type": "content_block_stop", "index": self.blocks - 1})

    def _call(self, call: ToolCall) -> bytes:
        """A call that has waited, from its start to its end."""
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        return self._delta("tool_use", block, call.arguments) + self._close()


def _thinking(reasoning: str) -> list[dict[str, Any]]:
    block = {"type": "thinking", "thinking": reasoning, "signature": _signature(reasoning)}
    return [block] if reasoning else []


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": as_object(call.arguments)}


def _signature(reasoning: str) -> str:
    """Nothing checks it; clients send thoughts back only with one."""
    return hashlib.sha256(reasoning.encode("utf-8", "surrogatepass")).hexdigest()


def _usage(reply: ReplySoFar) -> dict[str, int]:
    cached = min(reply.cached_tokens, reply.prompt_tokens)
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "output_tokens": reply.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
