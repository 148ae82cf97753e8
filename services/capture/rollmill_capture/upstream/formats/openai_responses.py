"""OpenAI Responses from an upstream that serves this API itself: no ids, so recorded and never trained. Pure.

Text appears three times in a stream (deltas, ``*.done``, the last event's response): the last one counts, and the
deltas where a stream has no end.
"""

from __future__ import annotations

from typing import Any

from rollmill_capture.upstream.formats.parsed_reply import Incomplete, ParsedReply, StreamAssembler, error_of
from rollmill_capture.upstream.formats.reply_items import ReplyItems

ENDS = {"response.completed", "response.incomplete"}
FINISH = {"max_output_tokens": "length"}
"""Reason of an incomplete response to the finish reason of chat completions."""


def parse_body(body: Any, _prompt_ids: object = None) -> ParsedReply:
    """The reply in a whole body."""
    error = error_of(body)
    if error is not None:
        return ParsedReply(incomplete="error_frame", error=error)
    if not isinstance(body, dict) or not isinstance(body.get("output"), list):
        return ParsedReply(incomplete="no_choices")
    return _gather_items(body).parsed(None)


def _gather_items(body: dict[str, Any]) -> ReplyItems:
    reply = ReplyItems(model=body.get("model") if isinstance(body.get("model"), str) else None)
    for position, item in enumerate(body.get("output") or ()):
        if isinstance(item, dict):
            _add_item(reply, position, item)
    reply.add_usage(body.get("usage"))
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    reply.finish_reason = FINISH.get(reason, reason) if isinstance(reason, str) else str(body.get("status"))
    return reply


def _add_item(reply: ReplyItems, position: int, item: dict[str, Any]) -> None:
    kind = item.get("type")
    if kind == "function_call":
        reply.begin_call(position, item.get("call_id"), item.get("name"), str(item.get("arguments") or ""))
        return
    texts = [part["text"] for part in item.get("content") or () if isinstance(part, dict) and "text" in part]
    if kind == "message":
        reply.texts += texts
    elif kind == "reasoning":
        reply.reasoning += texts


class OpenAiResponsesAssembler(StreamAssembler):
    """Gathers the events of one stream."""

    def __init__(self, _expected: int = 1, _prompt_ids: object = None) -> None:
        super().__init__()
        self._reply = ReplyItems()

    @property
    def finished(self) -> bool:
        return self.over

    def _error(self, chunk: Any) -> str | None:
        if not isinstance(chunk, dict) or chunk.get("type") not in ("error", "response.failed"):
            return error_of(chunk)
        response = chunk.get("response")
        wrapped = response if isinstance(response, dict) else chunk
        return error_of(wrapped) or str(chunk.get("message") or "the upstream gave no message")

    def _add(self, chunk: dict[str, Any]) -> None:
        kind, response = chunk.get("type"), chunk.get("response")
        if kind in ENDS and isinstance(response, dict):
            self._reply, self.over = _gather_items(response), True
        else:
            self._piece(str(kind), chunk)

    def _parsed(self, why: Incomplete | None, error: str | None) -> ParsedReply:
        return self._reply.parsed(why, error)

    def _piece(self, kind: str, event: dict[str, Any]) -> None:
        position, item = event.get("output_index"), event.get("item")
        position = position if type(position) is int else 0
        if kind == "response.output_text.delta":
            self._reply.texts.append(str(event.get("delta") or ""))
        elif kind == "response.reasoning_text.delta":
            self._reply.reasoning.append(str(event.get("delta") or ""))
        elif kind == "response.function_call_arguments.delta":
            self._reply.add_arguments(position, event.get("delta"))
        elif kind == "response.output_item.added" and isinstance(item, dict) and item.get("type") == "function_call":
            self._reply.begin_call(position, item.get("call_id"), item.get("name"))
