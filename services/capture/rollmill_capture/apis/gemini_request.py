"""Gemini ``generateContent``, the request: to chat completions. Pure.

Field names come in camel case or with underscores, as protocol buffers allow. Calls need no ids there: those that have
none are numbered in order, and results find their call by id or by name.
"""

from __future__ import annotations

from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.chat_reply import assistant_message
from rollmill_capture.apis.content import (
    Part,
    content_of,
    data_url,
    function_tool,
    image_part,
    objects,
    text_part,
    with_system,
)
from rollmill_capture.apis.history_cache import SessionHistory, json_text

IGNORED = ("safetySettings", "labels", "cachedContent")
SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "seed": "seed",
}
RESULT_KEYS = ("output", "result")
"""Where the SDKs put what a function returned."""


def field_of(where: Any, name: str) -> Any:
    """A field by its name in camel case, or with underscores."""
    if not isinstance(where, dict):
        return None
    found = where.get(name)
    return where.get(_underscored(name)) if found is None else found


def _underscored(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def chat_fields(body: dict[str, Any], model: str, history: SessionHistory) -> tuple[dict[str, Any], list[str]]:
    """The body for chat completions, and the fields that were ignored. Raises InvalidInputError."""
    config = field_of(body, "generationConfig") or {}
    if field_of(config, "candidateCount") not in (None, 1):
        raise InvalidInputError("`candidateCount` may be 1: ask again for another candidate")
    fields: dict[str, Any] = {"model": model}
    fields |= {
        chat_name: field_of(config, name) for name, chat_name in SAMPLING.items() if field_of(config, name) is not None
    }
    system = [str(part.get("text") or "") for part in _parts(field_of(body, "systemInstruction"))]
    fields["messages"] = with_system(system, _messages(field_of(body, "contents"), history))
    ignored = sorted(name for name in IGNORED if field_of(body, name))
    return {**fields, **_tools(body), **_format(config)}, ignored


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}]
    parts = field_of(content, "parts") if isinstance(content, dict) else content
    return objects([parts] if isinstance(parts, dict) else parts or [], "`parts`")


def _messages(contents: Any, history: SessionHistory) -> list[dict[str, Any]]:
    turns = _Turns(history)
    for content in [{"parts": [{"text": contents}]}] if isinstance(contents, str) else objects(contents, "`contents`"):
        role, parts = content.get("role"), _parts(content)
        if role == "model":
            turns.model(parts)
        elif role in (None, "user", "function", "tool"):
            turns.user(parts)
        else:
            raise InvalidInputError(f"a content has the role {role!r}; it may be 'user' or 'model'")
    return turns.messages


class _Turns:
    def __init__(self, history: SessionHistory) -> None:
        self.messages: list[dict[str, Any]] = []
        self._history = history
        self._open: list[tuple[str, str]] = []
        """Calls without a result yet: name and id."""
        self._count = 0

    def model(self, parts: list[dict[str, Any]]) -> None:
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        text = "".join(part["text"] for part in texts if not part.get("thought"))
        thoughts = "".join(part["text"] for part in texts if part.get("thought"))
        calls = [self._call(call) for part in parts if isinstance(call := field_of(part, "functionCall"), dict)]
        self.messages.append(assistant_message(text, thoughts, calls))

    def _call(self, call: dict[str, Any]) -> tuple[str, str, str]:
        name = str(call.get("name") or "")
        call_id = str(call.get("id") or f"call_{self._count}")
        self._count += 1
        self._open.append((name, call_id))
        return call_id, name, self._history.sampled_arguments(call.get("id"), name, call.get("args") or {})

    def user(self, parts: list[dict[str, Any]]) -> None:
        """Results of functions are turns of their own; what is between them keeps its position."""
        waiting: list[Part] = []
        for part in parts:
            response = field_of(part, "functionResponse")
            if isinstance(response, dict):
                self._flush(waiting)
                waiting = []
                self.messages.append(self._result(response))
            else:
                waiting.append(_part(part))
        self._flush(waiting)

    def _flush(self, parts: list[Part]) -> None:
        if parts:
            self.messages.append({"role": "user", "content": content_of(parts)})

    def _result(self, response: dict[str, Any]) -> dict[str, Any]:
        name, call_id = str(response.get("name") or ""), response.get("id")
        match = next((pair for pair in self._open if call_id in (None, pair[1]) and pair[0] == name), None)
        if match is not None:
            self._open.remove(match)
        found = call_id or (match[1] if match is not None else f"call_{name}")
        return {"role": "tool", "tool_call_id": str(found), "content": _returned(response.get("response"))}


def _returned(response: Any) -> str:
    if isinstance(response, dict) and len(response) == 1:
        name, value = next(iter(response.items()))
        if name in RESULT_KEYS:
            return value if isinstance(value, str) else json_text(value)
    return response if isinstance(response, str) else json_text(response)


def _part(part: dict[str, Any]) -> Part:
    inline, file = field_of(part, "inlineData"), field_of(part, "fileData")
    if isinstance(part.get("text"), str):
        return text_part(part["text"])
    if isinstance(inline, dict):
        return image_part(data_url(field_of(inline, "mimeType"), _plain_base64(inline.get("data"))))
    if isinstance(file, dict):
        return image_part(field_of(file, "fileUri"))
    raise InvalidInputError(f"a part of {', '.join(sorted(part)) or 'nothing'} cannot be passed on to an engine")


def _plain_base64(data: Any) -> Any:
    """The SDKs use the alphabet that is safe in URLs."""
    return data.replace("-", "+").replace("_", "/") if isinstance(data, str) else data


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    tools = [made for tool in objects(body.get("tools") or [], "`tools`") for made in _functions(tool)]
    if not tools:
        return {}
    config = field_of(field_of(body, "toolConfig"), "functionCallingConfig")
    allowed = field_of(config, "allowedFunctionNames") or []
    if not isinstance(allowed, list):
        raise InvalidInputError("`allowedFunctionNames` must be a list of names")
    mode = str(field_of(config, "mode") or "AUTO").upper()
    if allowed and mode == "ANY":
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return {"tools": tools, "tool_choice": {"ANY": "required", "NONE": "none"}.get(mode, "auto")}


def _functions(tool: dict[str, Any]) -> list[dict[str, Any]]:
    declared = field_of(tool, "functionDeclarations")
    others = sorted(name for name, value in tool.items() if value is not None and not name.startswith("function"))
    if others:
        raise InvalidInputError(f"the tool {others[0]!r} runs at Google; give tools with `functionDeclarations`")
    return [_function(item) for item in objects(declared or [], "`functionDeclarations`")]


def _function(declared: dict[str, Any]) -> dict[str, Any]:
    schema = field_of(declared, "parametersJsonSchema")
    parameters = schema if schema is not None else _json_schema(declared.get("parameters"))
    return function_tool(declared.get("name"), declared.get("description"), parameters)


def _json_schema(schema: Any) -> Any:
    """Gemini's schemas name types in capitals, and have ``nullable``."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: value if name in ("enum", "required") else _json_schema(value) for name, value in schema.items()}
    kind = made.get("type")
    if isinstance(kind, str):
        made["type"] = [kind.lower(), "null"] if made.pop("nullable", False) is True else kind.lower()
    return made


def _format(config: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    thinking = field_of(config, "thinkingConfig")
    if isinstance(thinking, dict) and field_of(thinking, "thinkingBudget") is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": field_of(thinking, "thinkingBudget") != 0}
    schema = field_of(config, "responseJsonSchema") or _json_schema(field_of(config, "responseSchema"))
    if schema:
        wanted = {"name": "answer", "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif field_of(config, "responseMimeType") == "application/json":
        fields["response_format"] = {"type": "json_object"}
    return fields
