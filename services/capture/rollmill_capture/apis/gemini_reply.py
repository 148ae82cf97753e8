"""Gemini ``generateContent``, the reply: from chat completions, whole and as a stream. Pure.

A call's arguments are an object there, so calls are told in the last chunk, when they are whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.chat_reply import Piece, ReplySoFar, replayed
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
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GeminiErrorFormat:
    keep_alive = b""
    """Its SDK takes every line that is no data for the start of an error."""

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        del param
        return {"error": {"code": status, "message": message, "status": _STATUS.get(status, "INTERNAL")}}

    def frame(self, status: int, message: str) -> bytes:
        return b"data: " + orjson.dumps(self.error(status, message)) + b"\n\n"


SHAPE = GeminiErrorFormat()


@dataclass(frozen=True)
class GeminiApi:
    """One of its two methods; without ``alt=sse`` a stream is a JSON array, and told at once."""

    streams: bool
    name: str = "gemini"
    shape: ErrorFormat = SHAPE

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        model = str(place.get("model") or "")
        if not model:
            raise InvalidInputError("the path must name a model")
        stream = self.streams and place.get("alt") == "sse"
        fields, ignored = chat_fields(body, model, memory)
        answer = GeminiFormatter(model, memory, as_list=self.streams and not stream)
        # The method says whether the reply is a stream; of the engine's own way to say it the body knows nothing.
        fields |= {"stream": True} if stream else {}
        return ParsedRequest(CHAT, fields, answer, stream, translated=True, ignored=tuple(ignored))


@dataclass(frozen=True)
class GeminiFormatter:
    model: str
    memory: SessionHistory
    as_list: bool = False
    response_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    shape: ErrorFormat = SHAPE

    def voice(self) -> GeminiStreamFormatter:
        return GeminiStreamFormatter(self)

    def whole(self, raw: bytes, body: Any) -> bytes:
        del raw
        reply = ReplySoFar()
        for chunk in replayed(body):
            reply.add(chunk)
        said = self.ended(reply, Piece(reply.reasoning, reply.text))
        return orjson.dumps([said] if self.as_list else said)

    def ended(self, reply: ReplySoFar, piece: Piece) -> dict[str, Any]:
        """The last thing said: ``piece``, the calls, and why it ends."""
        calls = reply.tool_calls()
        for call in calls:
            self.memory.keep_call(call.call_id, call.name, call.arguments)
        parts = [
            {"functionCall": {"id": call.call_id, "name": call.name, "args": as_object(call.arguments)}}
            for call in calls
        ]
        said = self.said(piece, parts)
        said["candidates"][0]["finishReason"] = FINISH.get(reply.finish_reason or "", "OTHER")
        return {**said, "usageMetadata": _usage(reply)}

    def said(self, piece: Piece, more: list[dict[str, Any]]) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        parts += [{"text": piece.reasoning, "thought": True}] if piece.reasoning else []
        parts += [{"text": piece.text}] if piece.text else []
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": [*parts, *more]}, "index": 0}
        return {"candidates": [candidate], "modelVersion": self.model, "responseId": self.response_id}


@dataclass
class GeminiStreamFormatter:
    answer: GeminiFormatter
    reply: ReplySoFar = field(default_factory=ReplySoFar)

    def chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        del event
        piece = self.reply.add(chunk)
        return _data(self.answer.said(piece, [])) if piece.reasoning or piece.text else b""

    def end(self) -> bytes:
        return _data(self.answer.ended(self.reply, Piece()))


def _usage(reply: ReplySoFar) -> dict[str, int]:
    return {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": reply.completion_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
        "cachedContentTokenCount": reply.cached_tokens,
    }


def _data(said: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(said) + b"\n\n"
