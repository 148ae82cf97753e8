"""OpenAI chat completions and completions: the engine gets the client's request, the client the engine's reply.

Token ids and log-probs that the client did not ask for are taken out of the reply. Each API checks only what capture
depends on; the engine checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.sse import ServerEvent
from rollmill_capture.upstream.formats.chat import choices_of
from rollmill_capture.upstream.formats.parsed_reply import Ids, as_ids
from rollmill_capture.upstream.formats.upstream_format import CHAT, COMPLETIONS, UpstreamFormat

DONE = b"data: [DONE]\n\n"
MAX_CHOICES = 128
"""OpenAI's own limit of `n`."""
META_DETAILS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")
_IDS = {"prompt_token_ids", "token_ids", "output_ids"}


class ChatApi:
    name = "chat"
    error_format: ErrorFormat = OPENAI

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params, history
        stream, options = is_stream(body), _stream_options(body)
        if not isinstance(body.get("messages"), list):
            raise InvalidInputError("`messages` must be a list of messages")
        requested = RequestedDetails(
            ids=body.get("return_token_ids") is True,
            logprobs=body.get("logprobs") is True,
            usage=not stream or options.get("include_usage") is True,
        )
        return ParsedRequest(CHAT, body, passthrough_formatter(CHAT, requested), stream, number_of_choices(body))


class CompletionsApi:
    """One prompt as text or ids, or a batch of them."""

    name = "completions"
    error_format: ErrorFormat = OPENAI

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params, history
        stream, options, prompt = is_stream(body), _stream_options(body), body.get("prompt")
        requested = RequestedDetails(
            ids=body.get("return_token_ids") is True,
            logprobs=type(body.get("logprobs")) is int,
            usage=not stream or options.get("include_usage") is True,
        )
        choices = number_of_choices(body) * _number_of_prompts(prompt)
        formatter = passthrough_formatter(COMPLETIONS, requested)
        return ParsedRequest(COMPLETIONS, body, formatter, stream, choices, prompt_ids=_single_prompt(prompt))


def is_stream(body: dict[str, Any]) -> bool:
    """Raises InvalidInputError."""
    stream = body.get("stream") or False
    if type(stream) is not bool:
        raise InvalidInputError("`stream` must be true or false")
    return stream


def number_of_choices(body: dict[str, Any], name: str = "n") -> int:
    """Raises InvalidInputError."""
    count = body.get(name) or 1
    if type(count) is not int or not 0 < count <= MAX_CHOICES:
        raise InvalidInputError(f"`{name}` must be a number from 1 to {MAX_CHOICES}")
    return count


def _stream_options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidInputError("`stream_options` must be an object")
    return options


def _number_of_prompts(prompt: Any) -> int:
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise InvalidInputError("`prompt` must be a text, a list of token ids, or a list of such")
    return 1 if isinstance(prompt[0], int) else len(prompt)


def _single_prompt(prompt: Any) -> Ids | None:
    """The ids of the one prompt, where it is given as ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return as_ids(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None


@dataclass(frozen=True)
class RequestedDetails:
    """What the client itself asked for; the rest of what capture asks for is taken out of its reply."""

    ids: bool = False
    logprobs: bool = False
    usage: bool = True


@dataclass(frozen=True)
class PassthroughFormatter:
    """The engine's reply as it is, but for what ``strip`` takes out; None: nothing is taken out."""

    upstream_format: UpstreamFormat
    error_format: ErrorFormat = OPENAI
    strip: Callable[[Any], Any] | None = None
    usage: bool = True
    """The client asked for the chunk that ends a stream with usage alone."""

    def stream_formatter(self) -> PassthroughStreamFormatter:
        return PassthroughStreamFormatter(self)

    def format_body(self, raw: bytes, body: Any) -> bytes:
        return raw if self.strip is None else orjson.dumps(self.strip(body))


@dataclass(frozen=True)
class PassthroughStreamFormatter:
    formatter: PassthroughFormatter

    def format_chunk(self, event: ServerEvent, chunk: dict[str, Any]) -> bytes:
        if not self.formatter.usage and _has_only_usage(chunk):
            return b""
        name = b"" if event.name == "message" else b"event: " + event.name.encode() + b"\n"
        if self.formatter.strip is None:
            return name + b"data: " + event.data.replace(b"\n", b"\ndata: ") + b"\n\n"
        return name + b"data: " + orjson.dumps(self.formatter.strip(chunk)) + b"\n\n"

    def format_end(self) -> bytes:
        return DONE if self.formatter.upstream_format.has_done else b""


def passthrough_formatter(upstream_format: UpstreamFormat, requested: RequestedDetails) -> PassthroughFormatter:
    """For a format with choices."""
    strips = {(False, False): without_details, (True, False): without_logprobs, (False, True): without_ids}
    strip = strips.get((requested.ids, requested.logprobs))
    return PassthroughFormatter(upstream_format, strip=strip, usage=requested.usage)


def without_details(body: Any) -> Any:
    """A body or chunk without ids and log-probs. Changes ``body`` in place: parse it before."""
    return _without(body, ids=True, logprobs=True)


def without_ids(body: Any) -> Any:
    """A body or chunk without token ids. Changes ``body`` in place."""
    return _without(body, ids=True, logprobs=False)


def without_logprobs(body: Any) -> Any:
    """A body or chunk without log-probs. Changes ``body`` in place."""
    return _without(body, ids=False, logprobs=True)


def _without(body: Any, *, ids: bool, logprobs: bool) -> Any:
    for part in body if isinstance(body, list) else (body,):
        if isinstance(part, dict):
            _strip(part, ids=ids, logprobs=logprobs)
            for choice in choices_of(part):
                if ids:
                    choice.pop("meta_info", None)
                _strip(choice, ids=ids, logprobs=logprobs)
    return body


def _strip(part: dict[str, Any], *, ids: bool, logprobs: bool) -> None:
    if ids:
        for name in part.keys() & _IDS:
            del part[name]
        if "provider_specific_fields" in part and isinstance(part["provider_specific_fields"], dict):
            part["provider_specific_fields"].pop("token_ids", None)
    if logprobs:
        part.pop("prompt_logprobs", None)
        if "logprobs" in part:
            part["logprobs"] = None
        if "meta_info" in part and isinstance(part["meta_info"], dict):
            for name in META_DETAILS:
                part["meta_info"].pop(name, None)


def _has_only_usage(chunk: dict[str, Any]) -> bool:
    """The chunk that ends a stream with usage alone: a client that did not ask for it may fail on it."""
    return not chunk.get("choices") and chunk.get("usage") is not None
