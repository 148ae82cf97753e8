"""A reply that the engine breaks off for new weights, and how it goes on: by its prompt's ids and those sampled so far.

The rest is asked for as a completion (vLLM takes ids as prompt) and converted to chat, so that the client sees one
reply (rule A12; bug class: agents got partial answers with reason abort, whole groups were lost). Reasoning and tool
calls are parsed from the text of all that was sampled (`rollmill_capture.proxy.reasoning_parser`). Grammars, penalties
and counts over the whole reply cannot begin in the middle: such a reply is not continued. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from rollmill.models import PolicyVersion, VersionRun, VersionRuns
from rollmill_capture.coordination.policies import version_span
from rollmill_capture.model_config import Route
from rollmill_capture.proxy.reasoning_parser import CannotContinueError, ReasoningAndToolParser
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.sse import Comment, EventParser, ServerEvent
from rollmill_capture.upstream.formats.chat import choices_of
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply
from rollmill_capture.upstream.formats.upstream_format import CHAT

ABORT = "abort"
TRUNCATED = "length"
STOP = "stop"
CALLS = "tool_calls"

_KEPT = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "priority",
    "stream",
    "stream_options",
)
"""Fields that mean the same to the rest of a reply as to its beginning."""
_FORBIDDEN = (
    "functions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "prompt_logprobs",
)
"""Fields that, when they are set, depend on the whole reply."""
_UNSET: Mapping[str, tuple[Any, ...]] = {"repetition_penalty": (None, 1)}
"""Values that mean "not set", where they are not those of all fields."""
_TEXTS = ("tool_calls", "reasoning", "reasoning_content")
_FREE = (None, "auto", "none")
"""Choices of tools that need no grammar."""


@dataclass
class Continuation:
    """Of one call. ``parts``: version and number of tokens of each part that has ended."""

    upstream_request: UpstreamRequest
    parts: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    text_parser: ReasoningAndToolParser | None = None
    """Of the part that runs, where its text has to be parsed; None: its text is the content."""

    @property
    def sampled(self) -> int:
        return sum(tokens for _, tokens in self.parts)

    def end_part(self, route: Route, announced: PolicyVersion, parsed: ParsedReply) -> None:
        """What was sampled since the last part is of the version that the engine named last, or of ``announced``."""
        span = version_span(route, parsed.weight_versions[-1:], announced, announced)
        self.parts.append((span.before, parsed.sampled_tokens - self.sampled))

    @property
    def versions(self) -> VersionRuns | None:
        """Of all sampled tokens; None: there was but one part, and the call has its version."""
        if len(self.parts) < 2:  # noqa: PLR2004  # two parts have a border between them
            return None
        return tuple(VersionRun(version, tokens) for version, tokens in self.parts if tokens)

    def tokens_left(self, parsed: ParsedReply) -> int | None:
        """Tokens that may still be sampled; None: as many as the model has room for.

        Raises CannotContinueError where the rest would not be as if nothing had happened.
        """
        self._check_continuable(parsed)
        fields = self.upstream_request.fields
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
        return None if limit is None else int(limit) - parsed.sampled_tokens

    def needs_text(self, parsed: ParsedReply) -> bool:
        """Whether reasoning or tool calls may be in what is sampled: `start_text_parser` then needs its text."""
        return self._tools or any(_message(parsed).get(name) for name in _TEXTS)

    def sampled_ids(self, parsed: ParsedReply) -> list[int]:
        """Of all that was sampled."""
        ids = parsed.choices[0].token_ids if parsed.choices else None
        return [] if ids is None else ids.tolist()

    def start_text_parser(self, parsed: ParsedReply, text: str, name: str) -> None:
        """Parse the rest as what follows ``text``. Raises CannotContinueError."""
        self.text_parser = ReasoningAndToolParser(text, _message(parsed), tools=self._tools, name=name)

    @property
    def _tools(self) -> bool:
        fields = self.upstream_request.fields
        return bool(fields.get("tools")) and fields.get("tool_choice") != "none"

    def request(self, parsed: ParsedReply, salt: str | None) -> bytes:
        """The completion that gives the rest: by the ids, with the budget that is left."""
        fields = self.upstream_request.fields
        prompt = [] if parsed.prompt_ids is None else parsed.prompt_ids.tolist()
        marked = {} if self.text_parser is None else {"skip_special_tokens": False}
        body = {
            **{name: fields[name] for name in _KEPT if fields.get(name) is not None},
            **marked,
            "prompt": [*prompt, *self.sampled_ids(parsed)],
            "max_tokens": self.tokens_left(parsed),  # null, too, has to be sent: left out it is 16
            "logprobs": 1,
            "return_token_ids": True,
        }
        return orjson.dumps(body if salt is None else {**body, "cache_salt": salt})

    def _check_continuable(self, parsed: ParsedReply) -> None:
        fields = self.upstream_request.fields
        if self.upstream_request.upstream_format is not CHAT or self.upstream_request.choices != 1:
            raise CannotContinueError("only a chat completion with one choice is continued")
        forbidden = [name for name in _FORBIDDEN if fields.get(name) not in _UNSET.get(name, (None, [], 0))]
        if forbidden:
            raise CannotContinueError(f"`{forbidden[0]}` depends on the whole reply")
        if self._tools and fields.get("tool_choice") not in _FREE:
            raise CannotContinueError("a tool that has to be called is a grammar over the whole reply")
        if parsed.prompt_ids is None or any(choice.token_ids is None for choice in parsed.choices):
            raise CannotContinueError("the engine gave no ids to go on from")
        if _message(parsed).get("refusal"):
            raise CannotContinueError("the reply is a refusal")


def _message(parsed: ParsedReply) -> dict[str, Any]:
    """The message as the client has it."""
    found: dict[str, Any] = orjson.loads(parsed.choices[0].message or b"{}") if parsed.choices else {}
    return found


def is_aborted(body: Any) -> bool:
    """Whether the engine broke off the reply of this chat body or chunk."""
    return isinstance(body, dict) and any(choice.get("finish_reason") == ABORT for choice in choices_of(body))


def without_end(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk as if it were in the middle of its reply."""
    return {**chunk, "choices": [{**choice, "finish_reason": None} for choice in choices_of(chunk)]}


def as_chat_chunk(
    chunk: Mapping[str, Any], like: Mapping[str, Any], sampled: int, text_parser: ReasoningAndToolParser | None = None
) -> dict[str, Any]:
    """A completion's chunk as one of the chat's stream. ``like``: a chunk of the beginning; ``sampled``: its tokens."""
    converted = {**chunk, **{name: like[name] for name in ("id", "object", "created", "model") if name in like}}
    converted["choices"] = [_as_chat_choice(choice, text_parser) for choice in choices_of(dict(chunk))]
    if isinstance(chunk.get("usage"), dict):
        converted["usage"] = _whole_usage(chunk["usage"], sampled)
    return converted


class ContinuedStream:
    """A completion's stream, converted to the rest of a chat's: an iterator of bytes."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        like: Mapping[str, Any],
        sampled: int,
        text_parser: ReasoningAndToolParser | None = None,
    ) -> None:
        self._text_parser = text_parser
        self._pieces = pieces
        self._like = like
        self._sampled = sampled
        self._parser = EventParser()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return b"".join(map(self._convert, self._parser.feed(await anext(self._pieces))))

    def _convert(self, event: ServerEvent | Comment) -> bytes:
        if isinstance(event, Comment):
            return b": \n\n"
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            chunk = None
        if isinstance(chunk, dict) and "error" not in chunk:
            return (
                b"data: " + orjson.dumps(as_chat_chunk(chunk, self._like, self._sampled, self._text_parser)) + b"\n\n"
            )
        return b"data: " + event.data.replace(b"\n", b"\ndata: ") + b"\n\n"


def end_chunk(like: Mapping[str, Any]) -> dict[str, Any]:
    """The chunk that ends a reply when its budget is used up."""
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": TRUNCATED, "token_ids": []}
    return {**{name: item for name, item in like.items() if name != "usage"}, "choices": [choice]}


def join_bodies(
    chat: dict[str, Any], rest: dict[str, Any], text_parser: ReasoningAndToolParser | None = None
) -> dict[str, Any]:
    """A chat's body and the completion that went on with it, as one chat's body. Raises CannotContinueError."""
    first, more = choices_of(chat)[0], _as_chat_choice((choices_of(rest) or [{}])[0], text_parser)
    message = first.get("message") or {}
    plain = (message.get("content") or "") + more["delta"].get("content", "")
    choice = {
        **first,
        "message": {**message, **({"content": plain} if text_parser is None else text_parser.message())},
        "token_ids": [*(first.get("token_ids") or []), *(more.get("token_ids") or [])],
        "logprobs": {"content": [*_entries(first), *_entries(more)]},
        "finish_reason": more.get("finish_reason"),
        "stop_reason": more.get("stop_reason"),
    }
    usage = chat.get("usage") or {}
    whole = (
        _whole_usage(rest["usage"], usage.get("completion_tokens", 0)) if isinstance(rest.get("usage"), dict) else {}
    )
    return {**chat, "choices": [choice], "usage": {**usage, **whole}}


def _entries(choice: Mapping[str, Any]) -> list[Any]:
    logprobs = choice.get("logprobs")
    return list(logprobs.get("content") or []) if isinstance(logprobs, dict) else []


def _as_chat_choice(choice: Mapping[str, Any], text_parser: ReasoningAndToolParser | None) -> dict[str, Any]:
    text, finish = choice.get("text") or "", choice.get("finish_reason")
    delta = {"content": text}
    if text_parser is not None:
        delta = text_parser.feed(text, final=finish not in (None, ABORT))
        finish = CALLS if finish == STOP and text_parser.calls else finish
    return {
        "index": choice.get("index", 0),
        "delta": delta,
        "logprobs": _chat_logprobs(choice.get("logprobs")),
        "finish_reason": finish,
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids"),
    }


def _chat_logprobs(logprobs: Any) -> dict[str, Any] | None:
    if not isinstance(logprobs, dict):
        return None
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    texts = [*tokens, *[""] * (len(values) - len(tokens))]
    entries = zip(texts, values, strict=False)
    return {
        "content": [{"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in entries]
    }


def _whole_usage(usage: Mapping[str, Any], sampled: int) -> dict[str, Any]:
    """A completion's usage counts the beginning of the reply as prompt."""
    prompt, completion = usage.get("prompt_tokens", 0) - sampled, usage.get("completion_tokens", 0) + sampled
    return {**usage, "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
