"""What a reply comes down to, whatever its wire format: tokens, message, end, and why it may not be trained. Pure.

Also what all formats share: checks of token ids and log-probs, errors, and the interface for streams.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]

Incomplete = Literal["error_frame", "no_terminal_frame", "not_sse", "not_json", "bad_frame", "no_choices"]
"""Why an answer is no whole reply: an error in place of a frame; a stream that just ended; a body that is no
stream, or no JSON; a frame that is no JSON object; an answer without choices."""

SENTINEL = -9999.0
"""vLLM's value for a missing log-prob, and its lower clamp: no evidence either way."""
HIGHEST = 1.0
"""Rounding may lift a log-prob a little over 0; a value beyond this is no log-prob."""
MAX_ID = 2**31 - 1

EMPTY_ARGUMENTS = "tool_args_empty"
"""A call without the text of its arguments: some streaming parsers lose it where several tokens come at once."""
NOT_PARSED = "tool_parse_error"
"""The markup of a call in the text, and no call: it was not well formed, or no parser is on."""
MARKUP = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=", "<|python_tag|>")
THOUGHT_ENDS = "</think>"


@dataclass(frozen=True)
class ParsedChoice:
    """One sampled reply. ``token_ids`` [n] int32; ``logprobs`` [n] float32 at token, NaN where it is unknown."""

    index: int
    token_ids: Ids | None = None
    """None: the engine gave none."""
    logprobs: LogProbs | None = None
    """None: the engine gave none. Not always as many as ids."""
    message: bytes | None = None
    """The assistant message as JSON."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def tokens(self) -> int:
        """Number of sampled token ids."""
        return 0 if self.token_ids is None else len(self.token_ids)

    @property
    def defect(self) -> str | None:
        """Why the log-probs or the end forbid training; None: they do not."""
        if not self.tokens:
            return "empty"
        if self.logprobs is None:
            return "logprobs_missing"
        if len(self.logprobs) != self.tokens:
            return f"logprobs({len(self.logprobs)})!=ids({self.tokens})"
        unknown = np.flatnonzero(np.isnan(self.logprobs))
        if unknown.size:
            return f"logprob_unknown_at:{unknown[0]}"
        return "partial:abort" if self.finish_reason == "abort" else None


@dataclass(frozen=True)
class ParsedReply:
    """One call's answer."""

    choices: tuple[ParsedChoice, ...] = ()
    prompt_ids: Ids | None = None
    """[p] int32; None: the engine gave none."""
    sent_ids: Ids | None = None
    """[s] int32, the prompt where the request gave it as ids."""
    several_prompts: bool = False
    """The choices answer different prompts, so ``prompt_ids`` is None."""
    usage: tuple[int, int] | None = None
    """Prompt (0: not reported) and completion tokens by the engine's own count; None where it reported none."""
    cached_tokens: int = 0
    """Prompt tokens with keys and values from the engine's prefix cache, as far as it reports them."""
    weight_versions: tuple[str, ...] = ()
    """Versions of the weights that sampled, as the engine names them: each once, in the order they appeared."""
    model: str | None = None
    incomplete: Incomplete | None = None
    """None: every choice came to its end, and nothing contradicts it."""
    error: str | None = None
    """The engine's own message where it failed."""

    @property
    def complete(self) -> bool:
        return self.incomplete is None

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled token ids, over all choices."""
        return sum(choice.tokens for choice in self.choices)

    def untrainable_reason(self, choice: ParsedChoice) -> str | None:
        """Why ``choice`` must not be trained; None: it may be."""
        return (
            self.incomplete
            or self._missing_ids(choice)
            or self._prompt_mismatch()
            or self._count_mismatch()
            or choice.defect
        )

    def _missing_ids(self, choice: ParsedChoice) -> str | None:
        if choice.token_ids is None:
            return "no_ids" if self.prompt_ids is None else "completion_ids_missing"
        if self.prompt_ids is None:
            return "several_prompts" if self.several_prompts else "prompt_ids_missing"
        return None

    def _prompt_mismatch(self) -> str | None:
        """Some paths decode a prompt of ids and encode it again: the client's tokens are not what was sampled from."""
        sent, served = self.sent_ids, self.prompt_ids
        if sent is None or served is None or np.array_equal(sent, served):
            return None
        return f"prompt_mismatch:sent({len(sent)}),served({len(served)})"

    def _count_mismatch(self) -> str | None:
        """Builds that lose ids of held-back tokens, or tokenise a prompt of ids again, show it only in the count."""
        prompt, completion = self.usage or (0, self.sampled_tokens)
        if completion != self.sampled_tokens:
            return f"captured_ids({self.sampled_tokens})!=usage.completion_tokens({completion})"
        known = 0 if self.prompt_ids is None else len(self.prompt_ids)
        return f"prompt_ids({known})!=usage.prompt_tokens({prompt})" if prompt not in (0, known) else None


class StreamAssembler(ABC):
    """Gathers the parsed ``data`` of one stream; one subclass per format."""

    def __init__(self) -> None:
        self._failure: tuple[Incomplete, str | None] | None = None
        self._chunks = 0
        self.over = False
        """The format itself states that nothing more will come."""

    def add(self, chunk: Any) -> None:
        """One parsed ``data``. Raises nothing, whatever it is."""
        error = self._error(chunk)
        if error is not None:
            self.fail("error_frame", error)
        elif isinstance(chunk, dict):
            self._chunks += 1
            self._add(chunk)
        else:
            self.fail("bad_frame", "a frame of the stream is no JSON object")

    def fail(self, why: Incomplete, message: str | None) -> None:
        """Nothing that comes later makes this a whole reply; the first reason stays."""
        self._failure = self._failure or (why, message)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Every choice that was asked for has come to its end."""

    def parsed(self) -> ParsedReply:
        """The reply as received so far, as if the stream ended here."""
        why, error = self._failure or (self._unfinished(), None)
        return self._parsed(why, error)

    def _unfinished(self) -> Incomplete | None:
        if self.finished:
            return None
        return "no_terminal_frame" if self._chunks else "not_sse"

    def _error(self, chunk: Any) -> str | None:
        return error_of(chunk)

    @abstractmethod
    def _add(self, chunk: dict[str, Any]) -> None: ...

    @abstractmethod
    def _parsed(self, why: Incomplete | None, error: str | None) -> ParsedReply: ...


def error_of(body: Any) -> str | None:
    """The message where ``body`` is an error, wrapped or flat; None: it is none."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if error is None and body.get("object") == "error":
        error = body
    if error is None:
        return None
    message = error.get("message") or error.get("type") if isinstance(error, dict) else error
    return str(message or "the upstream gave no message")


def as_ids(value: object) -> Ids | None:
    """A list of token ids as int32; None where it is absent, null, or anything else."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return None
    if value and not (min(value) >= 0 and max(value) <= MAX_ID):
        return None
    return np.array(value, dtype=np.int32)


def as_prompt(value: object) -> Ids | None:
    """A prompt's token ids; None also where the list is empty: no reply was sampled from nothing."""
    return as_ids(value) if value else None


def logprob_of(entry: object) -> float:
    """The log-prob of one entry, or of a bare number; NaN where it is unknown."""
    value = entry.get("logprob") if isinstance(entry, dict) else entry
    if type(value) is not float and type(value) is not int:
        return math.nan
    return float(value) if SENTINEL < value <= HIGHEST else math.nan


def parser_failures(message: bytes | None) -> list[str]:
    """Signs, in an assistant message (JSON) of a request with tools, that the engine's parser of tool calls failed.

    The ids are right, so such a reply is trained; but the agent got what the parser made of the sampled text.
    """
    whole = orjson.loads(message) if message else None
    if not isinstance(whole, dict):
        return []
    calls = whole.get("tool_calls")
    if isinstance(calls, list) and calls:
        return [EMPTY_ARGUMENTS] if any(_has_no_arguments(call) for call in calls) else []
    content = whole.get("content")
    # A call inside a thought is none.
    text = content.rpartition(THOUGHT_ENDS)[2] if isinstance(content, str) else ""
    return [NOT_PARSED] if any(mark in text for mark in MARKUP) else []


def _has_no_arguments(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and not function.get("arguments")
