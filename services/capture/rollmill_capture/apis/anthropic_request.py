"""Anthropic Messages, the request: to chat completions. Pure.

Tool results become messages of role ``tool``, thoughts the field for them, a tool's input the sampled text of the
arguments, where this replica remembers it.
"""

from __future__ import annotations

import re
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.chat_reply import assistant_message
from rollmill_capture.apis.content import (
    Part,
    content_of,
    data_url,
    function_tool,
    image_part,
    joined,
    known_fields,
    objects,
    text_part,
    with_system,
)
from rollmill_capture.apis.history_cache import SessionHistory, json_text

PASSED = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens")
TRANSLATED = (*PASSED, "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config")
IGNORED = (
    "metadata",
    "service_tier",
    "context_management",
    "betas",
    "anthropic_version",
    "inference_geo",
    "cache_control",
)
REFUSED = ("mcp_servers", "container")
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)
"""A line that a client puts in front of its system prompt and that differs from call to call: no prompt would extend
the one before it."""


def chat_fields(body: dict[str, Any], history: SessionHistory) -> tuple[dict[str, Any], list[str]]:
    """The body for chat completions, and the fields that were ignored. Raises InvalidInputError."""
    refused = [name for name in REFUSED if body.get(name)]
    if refused:
        raise InvalidInputError(f"`{refused[0]}` needs a service of Anthropic's own, which no engine has")
    passed, ignored = known_fields(body, TRANSLATED, IGNORED)
    fields = {name: body[name] for name in PASSED if body.get(name) is not None}
    messages = [turn for message in objects(body.get("messages"), "`messages`") for turn in _turns(message, history)]
    fields["messages"] = with_system(_system(body.get("system")), messages)
    return {**fields, **_tools(body), **_ending(body), **passed}, ignored


def stop_sequences(body: dict[str, Any]) -> tuple[str, ...]:
    """The texts that end a reply. Raises InvalidInputError."""
    found = body.get("stop_sequences") or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InvalidInputError("`stop_sequences` must be a list of texts")
    return tuple(found)


def _system(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        texts = [system or ""]
    else:
        texts = [str(block.get("text") or "") for block in objects(system, "`system`")]
    return [_BILLING.sub("", text) for text in texts]


def _turns(message: dict[str, Any], history: SessionHistory) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, "`content`")
    if role == "assistant":
        return [_assistant(blocks, history)]
    if role == "system":
        return [{"role": "system", "content": joined(str(block.get("text") or "") for block in blocks)}]
    if role != "user":
        raise InvalidInputError(f"a message has the role {role!r}; it may be 'user' or 'assistant'")
    return _user(blocks)


def _assistant(blocks: list[dict[str, Any]], history: SessionHistory) -> dict[str, Any]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for block in blocks:
        kinds.setdefault(str(block.get("type")), []).append(block)
    unknown = set(kinds) - {"text", "thinking", "redacted_thinking", "tool_use"}
    if unknown:
        raise InvalidInputError(f"an assistant's block of type {min(unknown)!r} cannot be passed on to an engine")
    calls = [_call(block, history) for block in kinds.get("tool_use", ())]
    text = "".join(str(block.get("text") or "") for block in kinds.get("text", ()))
    thoughts = "".join(str(block.get("thinking") or "") for block in kinds.get("thinking", ()))
    return assistant_message(text, thoughts, calls)


def _call(block: dict[str, Any], history: SessionHistory) -> tuple[str, str, str]:
    call_id, name = str(block.get("id") or ""), str(block.get("name") or "")
    return call_id, name, history.sampled_arguments(call_id, name, block.get("input") or {})


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools are turns of their own; what is between them keeps its position."""
    turns: list[dict[str, Any]] = []
    parts: list[Part] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            turns += _flushed(parts)
            parts = []
            turns.append(_result(block))
        else:
            parts.append(_part(block))
    return [*turns, *_flushed(parts)] or [{"role": "user", "content": ""}]


def _flushed(parts: list[Part]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content_of(parts)}] if parts else []


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        result: str | list[Part] = content or ""
    else:
        result = content_of([_part(item) for item in objects(content, "the content of a tool's result")])
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}


def _part(block: dict[str, Any]) -> Part:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return text_part(block.get("text"))
    if kind == "image" and isinstance(source, dict):
        by_url = source.get("type") == "url"
        return image_part(source.get("url") if by_url else data_url(source.get("media_type"), source.get("data")))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return text_part(source.get("data"))
    if kind == "search_result":
        return text_part(json_text({name: block.get(name) for name in ("title", "source", "content")}))
    raise InvalidInputError(f"a block of type {kind!r} cannot be passed on to an engine")


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools = body.get("tools")
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in objects(tools, "`tools`")]}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        fields["tool_choice"] = _choice(choice)
        if choice.get("disable_parallel_tool_use") is True:
            fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidInputError(
            f"tool {tool.get('name')!r} of type {tool['type']!r} runs at Anthropic, or has a schema that only its own "
            "models know; give tools with an `input_schema`"
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict"))


def _choice(choice: dict[str, Any]) -> Any:
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInputError(f"`tool_choice` is {kind!r}; it may be auto, any, tool or none")
    return kinds[kind]


def _ending(body: dict[str, Any]) -> dict[str, Any]:
    """What ends and shapes the reply."""
    fields: dict[str, Any] = {}
    if body.get("stop_sequences"):
        fields["stop"] = list(stop_sequences(body))
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict):
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled"}
    if isinstance(output, dict):
        fields |= {"reasoning_effort": output["effort"]} if isinstance(output.get("effort"), str) else {}
        fields |= _format(output.get("format"))
    return fields


def _format(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return {}
    schema = {"name": "answer", "schema": wanted.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
