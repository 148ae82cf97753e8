"""OpenAI Responses, the request: to chat completions. Pure.

Items of one turn of the assistant (thoughts, a message, calls) become one message, as chat completions have it.
"""

from __future__ import annotations

from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.chat_reply import assistant_message
from rollmill_capture.apis.content import (
    Part,
    content_of,
    function_tool,
    image_part,
    known_fields,
    objects,
    text_part,
    with_system,
)
from rollmill_capture.apis.history_cache import Messages, SessionHistory

PASSED = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
TRANSLATED = (
    *PASSED,
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "text",
    "reasoning",
    "previous_response_id",
)
IGNORED = (
    "include",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "top_logprobs",
    "truncation",
    "user",
)
REFUSED = ("background", "conversation", "prompt", "max_tool_calls")


def chat_fields(body: dict[str, Any], history: SessionHistory) -> tuple[dict[str, Any], Messages, list[str]]:
    """The body for chat completions, its messages that are new since the previous response, and the fields that were
    ignored. Raises InvalidInputError.
    """
    refused = [name for name in REFUSED if body.get(name)]
    if refused:
        raise InvalidInputError(
            f"`{refused[0]}` needs a server that keeps state of its own; send the whole input instead"
        )
    passed, ignored = known_fields(body, TRANSLATED, IGNORED)
    fields = {name: body[name] for name in PASSED if body.get(name) is not None}
    new = messages_of(body.get("input"))
    instructions = body.get("instructions")
    system = [instructions] if isinstance(instructions, str) else []
    fields["messages"] = _one_system(system, [*_history(body.get("previous_response_id"), history), *new])
    return {**fields, **_tools(body), **_ending(body), **passed}, tuple(new), ignored


def _history(previous: Any, history: SessionHistory) -> Messages:
    if previous is None:
        return ()
    found = history.messages_until(previous) if isinstance(previous, str) else None
    if found is None:
        raise InvalidInputError(
            f"Previous response with id {previous!r} not found: it is kept in the memory of one replica, for its "
            "session alone; send the whole input instead"
        )
    return found


def _one_system(system: list[str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages at the start become one; later ones keep their position."""
    start = 0
    while start < len(messages) and messages[start]["role"] == "system" and isinstance(messages[start]["content"], str):
        start += 1
    return with_system([*system, *(message["content"] for message in messages[:start])], messages[start:])


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The input as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        raise InvalidInputError("`input` must be a text or a list of items")
    made: list[dict[str, Any]] = []
    turn = _Turn()
    for item in objects(given, "`input`"):
        if turn.take(item):
            continue
        made += turn.messages()
        turn = _Turn()
        made.append(_message(item))
    return [*made, *turn.messages()]


class _Turn:
    """The items of one turn of the assistant."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, str, str]] = []
        self._any = False

    def take(self, item: dict[str, Any]) -> bool:
        """False: the item is no part of an assistant's turn."""
        kind = item.get("type") or "message"
        if kind == "reasoning":
            self._thoughts += _texts(item.get("content") or item.get("summary"))
        elif kind == "function_call":
            self._calls.append((str(item.get("call_id")), str(item.get("name")), str(item.get("arguments") or "")))
        elif kind == "message" and item.get("role") == "assistant":
            self._texts += _texts(item.get("content"))
        else:
            return False
        self._any = True
        return True

    def messages(self) -> list[dict[str, Any]]:
        thoughts = "".join(self._thoughts)
        return [assistant_message("".join(self._texts), thoughts, self._calls)] if self._any else []


def _texts(parts: Any) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    return [str(part.get("text") or part.get("refusal") or "") for part in objects(parts or [], "`content`")]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind != "message":
        raise InvalidInputError(f"an item of type {kind!r} cannot be passed on to an engine")
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise InvalidInputError(f"a message has the role {role!r}; it may be user, assistant, system or developer")
    return {"role": "user" if role == "user" else "system", "content": _content(item.get("content"))}


def _content(content: Any) -> str | list[Part]:
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([_part(part) for part in objects(content, "`content`")])


def _part(part: dict[str, Any]) -> Part:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return text_part(part.get("text"))
    if kind == "input_image":
        return image_part(part.get("image_url"), part.get("detail"))
    raise InvalidInputError(f"content of type {kind!r} cannot be passed on to an engine")


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools = body.get("tools")
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in objects(tools, "`tools`")]}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise InvalidInputError(f"`tool_choice` is of type {choice.get('type')!r}; it may be a function")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice is not None:
        fields["tool_choice"] = choice
    return fields


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidInputError(
            f"a tool of type {tool.get('type')!r} runs at OpenAI, or has a form that only its own models know; give "
            "tools of type 'function'"
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _ending(body: dict[str, Any]) -> dict[str, Any]:
    """What ends and shapes the reply."""
    fields: dict[str, Any] = {}
    if body.get("max_output_tokens") is not None:
        fields["max_tokens"] = body["max_output_tokens"]
    reasoning, text = body.get("reasoning"), body.get("text")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        fields["reasoning_effort"] = reasoning["effort"]
    wanted = text.get("format") if isinstance(text, dict) else None
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {name: wanted[name] for name in ("name", "schema", "strict", "description") if name in wanted}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(wanted, dict) and wanted.get("type") == "json_object":
        fields["response_format"] = {"type": "json_object"}
    return fields
