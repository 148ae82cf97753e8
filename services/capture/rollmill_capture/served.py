"""The request as served upstream, and the answer as the client asked for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.errors import InvalidInputError

ASKED = {"return_token_ids": True, "logprobs": True}
"""What capture needs of the engine, by field of the request."""

USAGE = "include_usage"

MAX_CHOICES = 128
"""OpenAI's own limit of `n`."""


@dataclass(frozen=True)
class Wants:
    """What the client itself asked for; the rest of what capture asks for is kept from it."""

    ids: bool
    logprobs: bool
    usage: bool

    @property
    def all_details(self) -> bool:
        return self.ids and self.logprobs


@dataclass(frozen=True)
class ServedRequest:
    body: bytes
    """The JSON body sent upstream."""
    original: bytes | None
    """The client's own; None where it is ``body`` without the ``added`` fields."""
    added: tuple[str, ...]
    """Names of the fields that capture added; they were absent."""
    fields: Mapping[str, Any]
    """The client's own fields."""
    stream: bool
    choices: int
    wants: Wants

    @property
    def model(self) -> str | None:
        model = self.fields.get("model")
        return model if isinstance(model, str) else None


def check_request(body: dict[str, Any]) -> None:
    """What capture itself relies on; the engine checks the rest. Raises InvalidInputError."""
    if type(body.get("stream") or False) is not bool:
        raise InvalidInputError("`stream` must be true or false")
    if not isinstance(body.get("messages"), list):
        raise InvalidInputError("`messages` must be a list of messages")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise InvalidInputError("`stream_options` must be an object")
    if type(body.get("n") or 1) is not int or not 0 < (body.get("n") or 1) <= MAX_CHOICES:
        raise InvalidInputError(f"`n` must be a number from 1 to {MAX_CHOICES}")


def serve(raw: bytes, body: dict[str, Any], model: str | None = None) -> ServedRequest:
    """The request that goes upstream. ``model``: the upstream's name for it, where it has another."""
    stream = body.get("stream") is True
    served, added, changed = _asking(body, stream=stream)
    if model is not None and model != body.get("model"):
        served["model"], changed = model, True
    return ServedRequest(
        body=orjson.dumps(served),
        original=raw if changed else None,
        added=tuple(added),
        fields=body,
        stream=stream,
        choices=body.get("n") or 1,
        wants=_wants(body, stream=stream),
    )


def _asking(body: dict[str, Any], *, stream: bool) -> tuple[dict[str, Any], list[str], bool]:
    added = [name for name in ASKED if name not in body]
    changed = any(name in body and body[name] is not True for name in ASKED)
    served = {**body, **ASKED}
    options = body.get("stream_options") or {}
    if stream and options.get(USAGE) is not True:
        served["stream_options"] = {**options, USAGE: True}
        if "stream_options" in body:
            changed = True
        else:
            added.append("stream_options")
    return served, added, changed


def _wants(body: dict[str, Any], *, stream: bool) -> Wants:
    options = body.get("stream_options") or {}
    return Wants(
        ids=body.get("return_token_ids") is True,
        logprobs=body.get("logprobs") is True,
        usage=not stream or options.get(USAGE) is True,
    )


def without_details(body: dict[str, Any]) -> dict[str, Any]:
    """A body or chunk without ids and log-probs. Changes ``body`` in place: read it before."""
    body.pop("prompt_token_ids", None)
    body.pop("prompt_logprobs", None)
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            _strip(choice)
    return body


def _strip(choice: dict[str, Any]) -> None:
    choice.pop("token_ids", None)
    choice.pop("prompt_token_ids", None)
    if "logprobs" in choice:
        choice["logprobs"] = None
    moved = choice.get("provider_specific_fields")
    if isinstance(moved, dict):
        moved.pop("token_ids", None)


def only_usage(chunk: dict[str, Any]) -> bool:
    """The chunk that ends a stream with usage alone: a client that did not ask for it may trip over it."""
    return not chunk.get("choices") and chunk.get("usage") is not None
