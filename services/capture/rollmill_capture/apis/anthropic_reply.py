"""Anthropic Messages, the reply: from chat completions, whole and as events. Pure.

Of several tool calls in a stream the first is sent as it comes and the others at the end, because blocks must not
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
from rollmill_capture.apis.chat_reply import PartialReply, ReplyDelta, ToolCall, as_chunks
from rollmill_capture.apis.history_cache import SessionHistory, as_object
from rollmill_capture.apis.openai import is_stream
from rollmill_capture.errors import ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.chat_stream import ToolCallDelta
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
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Every other status from 400 is "invalid_request_error", and from 500 "api_error"."""
_SERVER_ERROR = 500


class AnthropicErrorFormat:
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        del param
        kind = _ERRORS.get(status, "invalid_request_error" if status < _SERVER_ERROR else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def frame(self, status: int, message: str) -> bytes:
        return _event("error", self.error(status, message))


ERROR_FORMAT = AnthropicErrorFormat()


@dataclass(frozen=True)
class AnthropicApi:
    name: str = "messages"
    error_format: ErrorFormat = ERROR_FORMAT

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params
        if type(body.get("max_tokens")) is not int:
            raise InvalidInputError("`max_tokens` must be a number")
        fields, ignored = chat_fields(body, history)
        formatter = AnthropicFormatter(str(body.get("model") or ""), stop_sequences(body), history)
        return ParsedRequest(CHAT, fields, formatter, is_stream(body), translated=True, ignored=tuple(ignored))


@dataclass(frozen=True)
class AnthropicFormatter:
    model: str
    stops: tuple[str, ...]
    history: SessionHistory
    error_format: ErrorFormat = ERROR_FORMAT

    def stream_formatter(self) -> AnthropicStreamFormatter:
        return AnthropicStreamFormatter(self)

    def format_body(self, raw: bytes, body: Any) -> bytes:
        del raw
        reply = PartialReply()
        for chunk in as_chunks(body):
            reply.add(chunk)
        self.remember(reply)
        content = [*_thinking(reply.reasoning), *_text(reply.text), *map(_tool_use, reply.tool_calls())]
        return orjson.dumps({**self.head(reply), "content": content, **self.ending(reply), "usage": _usage(reply)})

    def head(self, reply: PartialReply) -> dict[str, Any]:
        del reply
        return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self.model}

    def ending(self, reply: PartialReply) -> dict[str, Any]:
        stop = reply.stop_reason
        if reply.finish_reason == "stop" and isinstance(stop, str) and stop in self.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOPS.get(reply.finish_reason or ""), "stop_sequence": None}

    def remember(self, reply: PartialReply) -> None:
        for call in reply.tool_calls():
            self.history.remember_call(call.call_id, call.name, call.arguments)


@dataclass
class AnthropicStreamFormatter:
    formatter: AnthropicFormatter
    reply: PartialReply = field(default_factory=PartialReply)
    blocks: int = 0
    open: str | None = None
    """Kind of the block that is being sent; a call's stays open to the end."""
    live_call: str | None = None
    """Id of the call that is sent as it comes."""
    late: list[str] = field(default_factory=list)
    """Text that came after the first call had begun."""

    def format_chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        del event
        starts = not self.reply.started
        added = self.reply.add(chunk)
        return (self._message_start() if starts and self.reply.started else b"") + self._added(added)

    def format_end(self) -> bytes:
        reply, formatter = self.reply, self.formatter
        formatter.remember(reply)
        waiting = [call for call in reply.tool_calls() if call.call_id != self.live_call]
        late = self._delta("text", {"type": "text", "text": ""}, "".join(self.late)) if self.late else b""
        frames = [b"" if reply.started else self._message_start(), late, self._close(), *map(self._whole_call, waiting)]
        delta = {"type": "message_delta", "delta": formatter.ending(reply), "usage": _usage(reply)}
        return b"".join([*frames, _event("message_delta", delta), _event("message_stop", {"type": "message_stop"})])

    def _message_start(self) -> bytes:
        usage = {**_usage(self.reply), "output_tokens": 0}
        message = {**self.formatter.head(self.reply), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"type": "message_start", "message": {**message, "usage": usage}})

    def _added(self, added: ReplyDelta) -> bytes:
        frames = b""
        if added.reasoning and self.live_call is None:
            frames += self._delta("thinking", {"type": "thinking", "thinking": "", "signature": ""}, added.reasoning)
        if added.text and self.live_call is None:
            frames += self._delta("text", {"type": "text", "text": ""}, added.text)
        elif added.text:
            self.late.append(added.text)
        return frames + b"".join(self._live_delta(call) for call in added.calls if call.number == 0)

    def _live_delta(self, call: ToolCallDelta) -> bytes:
        self.live_call = self.live_call or call.call_id or self.reply.call_id(0)
        block = {"type": "tool_use", "id": self.live_call, "name": call.name, "input": {}}
        return self._delta("tool_use", block, call.arguments)

    def _delta(self, kind: str, block: dict[str, Any], text: str) -> bytes:
        frames = b"" if self.open == kind else self._close() + self._start(kind, block)
        names = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
        types = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
        return frames + self._block_delta({"type": types[kind], names[kind]: text}) if text else frames

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self.open = kind
        start = {"type": "content_block_start", "index": self.blocks, "content_block": block}
        return _event("content_block_start", start)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"type": "content_block_delta", "index": self.blocks, "delta": delta})

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        signature = _signature(self.reply.reasoning)
        signed = (
            self._block_delta({"type": "signature_delta", "signature": signature}) if self.open == "thinking" else b""
        )
        self.open = None
        self.blocks += 1
        return signed + _event("content_block_stop", {"type": "content_block_stop", "index": self.blocks - 1})

    def _whole_call(self, call: ToolCall) -> bytes:
        """A call that had to wait, from its start to its end."""
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
    """Made up, because clients send thoughts back only with one; nothing checks it."""
    return hashlib.sha256(reasoning.encode("utf-8", "surrogatepass")).hexdigest()


def _usage(reply: PartialReply) -> dict[str, int]:
    cached = min(reply.cached_tokens, reply.prompt_tokens)
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "output_tokens": reply.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
