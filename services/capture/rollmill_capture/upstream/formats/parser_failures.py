"""Signs that the engine's parser of tool calls failed, though the ids are all there: such a reply is trained, and told.

The sampled text is right or wrong as the model wrote it; what the agent got is the parser's reading of it.
"""

from __future__ import annotations

from typing import Any

import orjson

EMPTY_ARGUMENTS = "tool_args_empty"
"""A call without the text of its arguments: some streaming parsers lose it where several tokens come at once."""
NOT_PARSED = "tool_parse_error"
"""The markup of a call in the text, and no call: it was not well formed, or no parser is on."""

MARKUP = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=", "<|python_tag|>")
THOUGHT_ENDS = "</think>"


def parser_failures(message: bytes | None) -> list[str]:
    """The signs in one assistant message (JSON) of a request that gave tools."""
    whole = orjson.loads(message) if message else None
    if not isinstance(whole, dict):
        return []
    calls = whole.get("tool_calls")
    if isinstance(calls, list) and calls:
        return [EMPTY_ARGUMENTS] if any(_is_empty(call) for call in calls) else []
    text = whole.get("content")
    # A call inside a thought is none.
    said = text.rpartition(THOUGHT_ENDS)[2] if isinstance(text, str) else ""
    return [NOT_PARSED] if any(mark in said for mark in MARKUP) else []


def _is_empty(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and not function.get("arguments")
