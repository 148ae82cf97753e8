"""Anthropic Messages from an upstream that serves this API itself: no ids, so recorded and never trained. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.upstream.formats.parsed_reply import Incomplete, ParsedReply, StreamAssembler, error_of
from rollmill_capture.upstream.formats.reply_items import ReplyItems


def parse_body(body: Any, _prompt_ids: object = None) -> ParsedReply:
    """The reply in a whole body. A tool's input is an object here, so the spacing of what was sampled is lost."""
    error = error_of(body)
    if error is not None:
        return ParsedReply(incomplete="error_frame", error=error)
    if not isinstance(body, dict) or not isinstance(body.get("content"), list):
        return ParsedReply(incomplete="no_choices")
    reply = ReplyItems()
    _begin(reply, body)
    for position, block in enumerate(body["content"]):
        if isinstance(block, dict):
            _add_block(reply, position, block)
    _end(reply, body)
    return reply.parsed(None)


def _begin(reply: ReplyItems, message: dict[str, Any]) -> None:
    reply.model = message.get("model") if isinstance(message.get("model"), str) else None
    reply.add_usage(message.get("usage"))


def _add_block(reply: ReplyItems, position: int, block: dict[str, Any]) -> None:
    kind = block.get("type")
    if kind == "text":
        reply.texts.append(str(block.get("text") or ""))
    elif kind == "thinking":
        reply.reasoning.append(str(block.get("thinking") or ""))
    elif kind == "tool_use":
        given = block.get("input")
        reply.begin_call(position, block.get("id"), block.get("name"), orjson.dumps(given).decode() if given else "")


def _end(reply: ReplyItems, ending: dict[str, Any]) -> None:
    reason, sequence = ending.get("stop_reason"), ending.get("stop_sequence")
    reply.finish_reason = reason if isinstance(reason, str) else reply.finish_reason
    reply.stop_reason = sequence if isinstance(sequence, str) else reply.stop_reason


class AnthropicMessagesAssembler(StreamAssembler):
    """Gathers the events of one stream; the number of output tokens in it is a running total."""

    def __init__(self, _expected: int = 1, _prompt_ids: object = None) -> None:
        super().__init__()
        self._reply = ReplyItems()
        self._finished = False

    @property
    def finished(self) -> bool:
        return self._finished

    def _add(self, chunk: dict[str, Any]) -> None:
        kind = chunk.get("type")
        if kind == "message_start" and isinstance(chunk.get("message"), dict):
            _begin(self._reply, chunk["message"])
        elif kind == "message_delta":
            _end(self._reply, chunk["delta"] if isinstance(chunk.get("delta"), dict) else {})
            self._reply.add_usage(chunk.get("usage"))
            self._finished = True
        elif kind == "message_stop":
            self.over = self._finished
        else:
            self._block(kind, chunk)

    def _parsed(self, why: Incomplete | None, error: str | None) -> ParsedReply:
        return self._reply.parsed(why, error)

    def _block(self, kind: Any, event: dict[str, Any]) -> None:
        position = event["index"] if type(event.get("index")) is int else 0
        block, delta = event.get("content_block"), event.get("delta")
        if kind == "content_block_start" and isinstance(block, dict):
            _add_block(self._reply, position, block)
        elif kind == "content_block_delta" and isinstance(delta, dict):
            _add_block(self._reply, position, {**delta, "type": str(delta.get("type")).removesuffix("_delta")})
            self._reply.add_arguments(position, delta.get("partial_json"))
