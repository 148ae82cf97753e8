"""Content of messages, in the parts that chat completions have: text and images. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollmill.errors import InvalidInputError

Part = dict[str, Any]


def text_part(text: Any) -> Part:
    if not isinstance(text, str):
        raise InvalidInputError("a text part must have a text")
    return {"type": "text", "text": text}


def image_part(url: Any, detail: Any = None) -> Part:
    """An image by its URL, or by its bytes as a ``data:`` URL."""
    if not isinstance(url, str) or not url:
        raise InvalidInputError("an image must have a URL or its bytes")
    extra = {} if detail in (None, "auto") else {"detail": detail}
    return {"type": "image_url", "image_url": {"url": url, **extra}}


def data_url(kind: Any, data: Any) -> str:
    if not isinstance(kind, str) or not isinstance(data, str):
        raise InvalidInputError("the bytes of an image must be base64 text with a media type")
    return f"data:{kind};base64,{data}"


def content_of(parts: list[Part]) -> str | list[Part]:
    """Parts as content: a plain text where there is nothing but one text, as agents of chat completions send it."""
    if not parts:
        return ""
    if all(part["type"] == "text" for part in parts):
        return joined(part["text"] for part in parts)
    return parts


def joined(texts: Iterable[str]) -> str:
    """Texts that follow each other in one message; engines flatten lists of texts the same way."""
    return "\n".join(texts)


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInputError(f"{what} must be a list of objects")
    return value


def known_fields(
    body: dict[str, Any], translated: Iterable[str], ignored: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Fields that no translation knows, which are the engine's own (``chat_template_kwargs``, ``min_p``, …), and the
    names of those that have no meaning for it.
    """
    known, meaningless = set(translated), set(ignored)
    passed = {name: value for name, value in body.items() if name not in known and name not in meaningless}
    return passed, sorted(name for name in body if name in meaningless and body[name] not in (None, [], {}))


def function_tool(name: Any, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise InvalidInputError("a tool must have a name")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def with_system(texts: list[str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message in front, from all system texts: templates know only one, and only there."""
    found = [text for text in texts if text]
    return [{"role": "system", "content": joined(found)}, *messages] if found else messages
