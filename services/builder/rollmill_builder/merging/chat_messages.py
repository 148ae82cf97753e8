"""What a later request did to a reply: chat messages compared as far as a chat template renders them."""

from __future__ import annotations

from typing import Any

from rollmill.models import dump_json
from rollmill_builder.storage.call_parts import Message


def system_prompts(messages: tuple[Message, ...]) -> list[str]:
    return [text_of(item.get("content")) for item in messages if item.get("role") in ("system", "developer")]


def reply_change(reply: Message, copy: Message) -> str | None:
    """What a later request did to a reply: None where it carries it unchanged, else a reason code.

    Compared are role, text, reasoning, and name and arguments of tool calls. Arguments are compared as text: the
    same object written in another way is other tokens.
    """
    if copy.get("role") != reply.get("role", "assistant"):
        return "reply_differs"
    if reasoning_of(reply) != reasoning_of(copy):
        return "reply_differs" if reasoning_of(copy) else "reasoning_stripped"
    if text_of(reply.get("content")) != text_of(copy.get("content")):
        return _text_change(text_of(reply.get("content")), text_of(copy.get("content")))
    return _tool_change(_tool_calls(reply), _tool_calls(copy))


def _text_change(reply: str, copy: str) -> str:
    """Many clients and templates cut thinking from the front of the text itself."""
    stripped = "</think>" in reply and reply.rpartition("</think>")[2].strip() == copy.strip()
    return "reasoning_stripped" if stripped else "reply_differs"


def _tool_change(reply: list[tuple[str, str]], copy: list[tuple[str, str]]) -> str | None:
    if reply == copy:
        return None
    return "tool_arguments" if [name for name, _ in reply] == [name for name, _ in copy] else "reply_differs"


def text_of(content: Any) -> str:
    """Message content as text: None is empty, text parts are joined, anything else is its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    return dump_json(content).decode()


def _is_text(part: Any) -> bool:
    typed = isinstance(part, dict) and isinstance(part.get("type"), str)
    return typed and "text" in part["type"] and isinstance(part.get("text"), str)


def reasoning_of(message: Message) -> str:
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def ends_with_text(message: Message) -> bool:
    """Whether text is the last of a message: it has some, and calls no tools."""
    return bool(text_of(message.get("content"))) and not _tool_calls(message)


def _tool_calls(message: Message) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [(str(item.get("name")), text_of(item.get("arguments"))) for item in functions if isinstance(item, dict)]
