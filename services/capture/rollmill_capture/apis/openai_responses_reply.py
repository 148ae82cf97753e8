"""OpenAI Responses, the reply: from chat completions, whole and as events in order. Pure.

Of several function calls in a stream the first is sent as it comes and the others at the end, because items follow each
other and pieces of calls may not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.chat_reply import PartialReply, ReplyDelta, ToolCall, as_chunks
from rollmill_capture.apis.history_cache import Messages, SessionHistory
from rollmill_capture.apis.openai import is_stream
from rollmill_capture.apis.openai_responses_request import chat_fields
from rollmill_capture.errors import ErrorFormat, error_body
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.chat_stream import ToolCallDelta
from rollmill_capture.upstream.formats.upstream_format import CHAT

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
COMPLETE = {"stop", "tool_calls", "function_call"}
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}
"""Fields of a request that its response repeats, and what they are where the request lacks them."""


class OpenAiResponsesErrorFormat:
    keep_alive = b": keep-alive\n\n"

    def error(self, status: int, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, message, param)

    def frame(self, status: int, message: str) -> bytes:
        # With the wrapper too: stock clients raise on it, and on no error that has none.
        inner = error_body(status, message)["error"]
        event = {"type": "error", "error": inner, "code": str(status), "message": message, "param": None}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


ERROR_FORMAT = OpenAiResponsesErrorFormat()


@dataclass(frozen=True)
class OpenAiResponsesApi:
    name: str = "responses"
    error_format: ErrorFormat = ERROR_FORMAT

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params
        fields, new, ignored = chat_fields(body, history)
        previous = body.get("previous_response_id")
        formatter = OpenAiResponsesFormatter(body, previous if isinstance(previous, str) else None, new, history)
        return ParsedRequest(CHAT, fields, formatter, is_stream(body), translated=True, ignored=tuple(ignored))


@dataclass(frozen=True)
class OpenAiResponsesFormatter:
    request: Mapping[str, Any]
    previous: str | None
    new: Messages
    history: SessionHistory
    response_id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    error_format: ErrorFormat = ERROR_FORMAT

    def stream_formatter(self) -> OpenAiResponsesStreamFormatter:
        return OpenAiResponsesStreamFormatter(self)

    def format_body(self, raw: bytes, body: Any) -> bytes:
        del raw
        reply = PartialReply()
        for chunk in as_chunks(body):
            reply.add(chunk)
        self.remember(reply)
        items: list[dict[str, Any]] = []
        if reply.reasoning:
            items.append(_reasoning(_item_id("rs"), reply.reasoning))
        if reply.text or not reply.calls:
            items.append(_message(_item_id("msg"), reply.text))
        return orjson.dumps(self.ended(reply, [*items, *(_call(_item_id("fc"), call) for call in reply.tool_calls())]))

    def remember(self, reply: PartialReply) -> None:
        """For a later request that names this response in place of its history."""
        self.history.remember_response(self.response_id, self.previous, (*self.new, reply.message()))

    def started(self, status: str = "in_progress") -> dict[str, Any]:
        echoed = {name: self.request.get(name) for name in _ECHOED if self.request.get(name) is not None}
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.get("model") or "",
            "output": [],
            **_ECHOED,
            **echoed,
            "store": False,
            "usage": None,
        }

    def ended(self, reply: PartialReply, output: list[dict[str, Any]]) -> dict[str, Any]:
        complete = reply.finish_reason in COMPLETE
        reason = None if complete else {"reason": INCOMPLETE.get(reply.finish_reason or "")}
        status = "completed" if complete else "incomplete"
        return {**self.started(status), "incomplete_details": reason, "output": output, "usage": _usage(reply)}


@dataclass
class OpenAiResponsesStreamFormatter:
    formatter: OpenAiResponsesFormatter
    reply: PartialReply = field(default_factory=PartialReply)
    number: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)
    """Items that are complete."""
    open: str | None = None
    """Type of the item that is being sent; a call's stays open to the end."""
    item_id: str = ""
    text: list[str] = field(default_factory=list)
    """Of the item that is being sent."""
    live_call: str | None = None
    """Id of the call that is sent as it comes."""
    call: ToolCall = field(default_factory=lambda: ToolCall("", "", ""))
    late: list[str] = field(default_factory=list)
    """Text that came after the first call had begun."""

    def format_chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        del event
        starts = not self.reply.started
        added = self.reply.add(chunk)
        return (self._start_response() if starts and self.reply.started else b"") + self._added(added)

    def format_end(self) -> bytes:
        reply, formatter = self.reply, self.formatter
        formatter.remember(reply)
        frames = [b"" if reply.started else self._start_response(), self._close()]
        if self.late or not (reply.text or reply.calls):
            frames += [self._delta("message", "".join(self.late)), self._close()]
        frames += [self._whole_call(call) for call in reply.tool_calls() if call.call_id != self.live_call]
        response = formatter.ended(reply, self.output)
        return b"".join([*frames, self._event(f"response.{response['status']}", response=response)])

    def _start_response(self) -> bytes:
        response = self.formatter.started()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _added(self, added: ReplyDelta) -> bytes:
        frames = b""
        if added.reasoning and self.live_call is None:
            frames += self._delta("reasoning", added.reasoning)
        if added.text and self.live_call is None:
            frames += self._delta("message", added.text)
        elif added.text:
            self.late.append(added.text)
        return frames + b"".join(self._live_delta(call) for call in added.calls if call.number == 0)

    def _live_delta(self, call: ToolCallDelta) -> bytes:
        self.live_call = self.live_call or call.call_id or self.reply.call_id(0)
        return self._delta("function_call", call.arguments, ToolCall(self.live_call, call.name, ""))

    def _whole_call(self, call: ToolCall) -> bytes:
        """A call that had to wait, from its start to its end."""
        return self._delta("function_call", call.arguments, call) + self._close()

    def _delta(self, kind: str, text: str, call: ToolCall | None = None) -> bytes:
        frames = b"" if self.open == kind else self._close() + self._start(kind, call)
        self.text.append(text)
        names = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return frames + (self._part_event(f"response.{names[kind]}.delta", delta=text, **logprobs) if text else b"")

    def _start(self, kind: str, call: ToolCall | None) -> bytes:
        self.open, self.text = kind, []
        if kind == "function_call" and call is not None:
            self.item_id = _item_id("fc")
            item = {**_call(self.item_id, call), "arguments": "", "status": "in_progress"}
            self.call = call
            return self._item_event("response.output_item.added", item)
        self.item_id = _item_id("rs" if kind == "reasoning" else "msg")
        item = {**_item(kind, self.item_id, ""), "status": "in_progress", "content": []}
        part = {"part": _part(kind, "")}
        return self._item_event("response.output_item.added", item) + self._part_event(
            "response.content_part.added", **part
        )

    def _close(self) -> bytes:
        kind, text = self.open, "".join(self.text)
        if kind is None:
            return b""
        if kind == "function_call":
            item = _call(self.item_id, ToolCall(self.call.call_id, self.call.name, text))
            done = self._part_event("response.function_call_arguments.done", name=self.call.name, arguments=text)
        else:
            item = _item(kind, self.item_id, text)
            done = self._text_done(kind, text)
        frames = done + self._item_event("response.output_item.done", item)
        self.output.append(item)
        self.open = None
        return frames

    def _text_done(self, kind: str, text: str) -> bytes:
        name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        done = self._part_event(name, text=text, **logprobs)
        return done + self._part_event("response.content_part.done", part=_part(kind, text))

    def _item_event(self, kind: str, item: dict[str, Any]) -> bytes:
        return self._event(kind, output_index=len(self.output), item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        index = {} if self.open == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=self.item_id, output_index=len(self.output), **index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _item_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _item(kind: str, item_id: str, text: str) -> dict[str, Any]:
    return _reasoning(item_id, text) if kind == "reasoning" else _message(item_id, text)


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    content = [_part("reasoning", text)]
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": "completed",
    }


def _message(item_id: str, text: str) -> dict[str, Any]:
    content = [_part("message", text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": content}


def _call(item_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(reply: PartialReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
