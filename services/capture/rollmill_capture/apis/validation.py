"""What every API checks by itself; the engine checks the rest. Raises InvalidInputError. Pure."""

from __future__ import annotations

from typing import Any

from rollmill.errors import InvalidInputError

MAX_CHOICES = 128
"""OpenAI's own limit of `n`."""


def is_stream(body: dict[str, Any]) -> bool:
    stream = body.get("stream") or False
    if type(stream) is not bool:
        raise InvalidInputError("`stream` must be true or false")
    return stream


def stream_options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidInputError("`stream_options` must be an object")
    return options


def number_of_choices(body: dict[str, Any], name: str = "n") -> int:
    count = body.get(name) or 1
    if type(count) is not int or not 0 < count <= MAX_CHOICES:
        raise InvalidInputError(f"`{name}` must be a number from 1 to {MAX_CHOICES}")
    return count


def object_list(body: dict[str, Any], name: str, what: str = "objects") -> list[dict[str, Any]]:
    """A list of objects; absent and null are an empty one."""
    found = body.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise InvalidInputError(f"`{name}` must be a list of {what}")
    return found
