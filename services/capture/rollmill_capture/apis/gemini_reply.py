"""Gemini ``generateContent``, the reply: from chat completions, whole and as a stream. Pure.

A call's arguments are an object there, so calls are sent in the last chunk, when they are whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.chat_reply import PartialReply, ReplyDelta, as_chunks
from rollmill_capture.apis.gemini_request import chat_fields
from rollmill_capture.apis.history_cache import SessionHistory, as_object
from rollmill_capture.errors import ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.upstream_format import CHAT

FINISH = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "function_call": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
}
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Every other status from 400 is INVALID_ARGUMENT, and from 500 INTERNAL."""
_SERVER_ERROR = 500


class GeminiErrorFormat:
    keep_alive = b""
    """None: its SDK takes every line that is no data for the start of an error."""

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        del param
        kind = _STATUS.get(status, "INVALID_ARGUMENT" if status < _SERVER_ERROR else "INTERNAL")
        return {"error": {"code": status, "message": message, "status": kind}}

    def frame(self, status: int, message: str) -> bytes:
        return b"data: " + orjson.dumps(self.error(status, message)) + b"\n\n"


ERROR_FORMAT = GeminiErrorFormat()


@dataclass(frozen=True)
class GeminiApi:
    """One of its two methods; without ``alt=sse`` a stream is a JSON array, and sent at once."""

    streams: bool
    name: str = "gemini"
    error_format: ErrorFormat = ERROR_FORMAT

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        model = str(params.get("model") or "")
        if not model:
            raise InvalidInputError("the path must name a model")
        stream = self.streams and params.get("alt") == "sse"
        fields, ignored = chat_fields(body, model, history)
        formatter = GeminiFormatter(model, history, as_list=self.streams and not stream)
        # The method decides whether the reply is a stream: the client's body has no field for it, the engine's has.
        fields |= {"stream": True} if stream else {}
        return ParsedRequest(CHAT, fields, formatter, stream, translated=True, ignored=tuple(ignored))


@dataclass(frozen=True)
class GeminiFormatter:
    model: str
    history: SessionHistory
    as_list: bool = False
    response_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    error_format: ErrorFormat = ERROR_FORMAT

    def stream_formatter(self) -> GeminiStreamFormatter:
        return GeminiStreamFormatter(self)

    def format_body(self, raw: bytes, body: Any) -> bytes:
        del raw
        reply = PartialReply()
        for chunk in as_chunks(body):
            reply.add(chunk)
        response = self.last_response(reply, ReplyDelta(reply.reasoning, reply.text))
        return orjson.dumps([response] if self.as_list else response)

    def last_response(self, reply: PartialReply, added: ReplyDelta) -> dict[str, Any]:
        """With ``added``, the calls, and why the reply ends."""
        calls = reply.tool_calls()
        for call in calls:
            self.history.remember_call(call.call_id, call.name, call.arguments)
        parts = [
            {"functionCall": {"id": call.call_id, "name": call.name, "args": as_object(call.arguments)}}
            for call in calls
        ]
        response = self.response(added, parts)
        response["candidates"][0]["finishReason"] = FINISH.get(reply.finish_reason or "", "OTHER")
        return {**response, "usageMetadata": _usage(reply)}

    def response(self, added: ReplyDelta, more: list[dict[str, Any]]) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        parts += [{"text": added.reasoning, "thought": True}] if added.reasoning else []
        parts += [{"text": added.text}] if added.text else []
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": [*parts, *more]}, "index": 0}
        return {"candidates": [candidate], "modelVersion": self.model, "responseId": self.response_id}


@dataclass
class GeminiStreamFormatter:
    formatter: GeminiFormatter
    reply: PartialReply = field(default_factory=PartialReply)

    def format_chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        del event
        added = self.reply.add(chunk)
        return _data(self.formatter.response(added, [])) if added.reasoning or added.text else b""

    def format_end(self) -> bytes:
        return _data(self.formatter.last_response(self.reply, ReplyDelta()))


def _usage(reply: PartialReply) -> dict[str, int]:
    return {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": reply.completion_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
        "cachedContentTokenCount": reply.cached_tokens,
    }


def _data(response: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(response) + b"\n\n"
