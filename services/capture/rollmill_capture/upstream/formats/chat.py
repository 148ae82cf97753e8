"""OpenAI chat completions and completions as vLLM and SGLang extend them: whole bodies, and what both forms share.

Places of the fields: prompt ids at the root (vLLM's chat) or in the choice (completions, SGLang), sampled ids and
log-probs in the choice, SGLang's weight version in ``metadata`` or the choice's ``meta_info``. vLLM's tokens-in route
``/inference/v1/generate`` answers in the same places, without text and usage; its prompt is in the request. A key that
is absent and one that is null mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rollmill_capture.upstream.formats.parsed_reply import (
    Ids,
    Incomplete,
    ParsedChoice,
    ParsedReply,
    as_ids,
    as_prompt,
    error_of,
    logprob_of,
)

_ID_PREFIX = "token_id:"
"""Of a token's text from servers asked for ``return_tokens_as_token_ids``."""
UNSET_VERSION = "default"
"""SGLang's weight version before a trainer has stamped one: unknown, and not version 0."""


def parse_body(body: Any, prompt_ids: Ids | None = None) -> ParsedReply:
    """The reply in a whole body, parsed JSON of any kind. ``prompt_ids``: of the request, where it has them."""
    error = error_of(body)
    if error is not None:
        return ParsedReply(incomplete="error_frame", error=error)
    root, choices = PartialRoot(sent=prompt_ids), []
    if isinstance(body, dict):
        found = choices_of(body)
        root.add(body, found)
        choices = [_parse_choice(index, choice) for index, choice in _by_index(found)]
    return root.parsed(tuple(choices), None if choices else "no_choices")


def _by_index(choices: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Choices by their index, whatever their order; by position where the indexes are not distinct."""
    by_index = {index_of(choice): choice for choice in choices}
    return sorted(by_index.items()) if len(by_index) == len(choices) else list(enumerate(choices))


def _parse_choice(index: int, choice: dict[str, Any]) -> ParsedChoice:
    partial = PartialChoice(index)
    partial.add(choice)
    return partial.parsed(_message(choice))


def _message(choice: dict[str, Any]) -> bytes | None:
    message = choice.get("message")
    if isinstance(message, dict):
        return orjson.dumps(message)
    text = choice.get("text")
    return orjson.dumps({"role": "assistant", "content": text}) if isinstance(text, str) else None


def choices_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a body or chunk; gateways send null, and chunks without the key."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        return []
    if len(choices) == 1 and isinstance(choices[0], dict):
        return choices
    return [choice for choice in choices if isinstance(choice, dict)]


def index_of(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int and index >= 0 else 0


@dataclass
class PartialChoice:
    """Ids, log-probs and end of one choice, gathered from one or many pieces."""

    index: int
    ids: list[Any] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: dict[str, Any]) -> None:
        ids, entries = sampled_ids(piece), logprob_entries(piece)
        if ids is not None:
            self.ids = _extended(self.ids, ids)
        if entries is not None:
            self.logprobs = _extended(self.logprobs, [logprob_of(entry) for entry in entries])
        self._end(piece)

    def _end(self, piece: dict[str, Any]) -> None:
        reason = piece.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
            stop = extension(piece, "stop_reason")
            stop = extension(piece, "matched_stop") if stop is None else stop
            self.stop_reason = stop if isinstance(stop, (int, str)) else None

    def parsed(self, message: bytes | None) -> ParsedChoice:
        return ParsedChoice(
            index=self.index,
            token_ids=as_ids(self.ids),
            logprobs=None if self.logprobs is None else np.array(self.logprobs, dtype=np.float32),
            message=message,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def _extended(items: list[Any] | None, more: list[Any]) -> list[Any]:
    if items is None:
        return list(more)
    items.extend(more)
    return items


@dataclass
class PartialRoot:
    """The fields of an answer outside its choices."""

    sent: Ids | None = None
    """The prompt as the request gave it; the answer's own prompt ids take precedence."""
    prompt_ids: Any = None
    several_prompts: bool = False
    usage: tuple[int, int] | None = None
    cached_tokens: int = 0
    weight_versions: list[str] = field(default_factory=list)
    model: str | None = None

    def add(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        """Take in a body or chunk and its `choices_of`."""
        self._add_prompt(body)
        self._add_usage(body.get("usage"))
        self._add_version(body.get("metadata"))
        for choice in choices:
            self._add_prompt(choice)
            self._add_version(choice.get("meta_info"))
        if self.model is None and isinstance(body.get("model"), str):
            self.model = body["model"]

    def _add_prompt(self, part: dict[str, Any]) -> None:
        ids = extension(part, "prompt_token_ids")
        if not ids:
            return
        if self.prompt_ids is None:
            self.prompt_ids = ids
        # A batch of prompts in one completions call: no one prompt is that of all choices.
        self.several_prompts |= ids != self.prompt_ids

    def _add_usage(self, usage: Any) -> None:
        """Usage on every chunk is a running total: the last one counts."""
        if not isinstance(usage, dict):
            return
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(completion) is int and completion >= 0:
            self.usage = (prompt if type(prompt) is int else 0, completion)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = cached if type(cached) is int else self.cached_tokens

    def _add_version(self, metadata: Any) -> None:
        if metadata is None:
            return
        version = metadata.get("weight_version") if isinstance(metadata, dict) else None
        known = version is not None and str(version) != UNSET_VERSION
        if known and (not self.weight_versions or self.weight_versions[-1] != str(version)):
            self.weight_versions.append(str(version))

    def _prompt(self) -> Ids | None:
        if self.several_prompts:
            return None
        return self.sent if self.prompt_ids is None else as_prompt(self.prompt_ids)

    def parsed(
        self, choices: tuple[ParsedChoice, ...], incomplete: Incomplete | None, error: str | None = None
    ) -> ParsedReply:
        return ParsedReply(
            choices=choices,
            prompt_ids=self._prompt(),
            sent_ids=self.sent,
            several_prompts=self.several_prompts,
            usage=self.usage,
            cached_tokens=self.cached_tokens,
            weight_versions=tuple(self.weight_versions),
            model=self.model,
            incomplete=incomplete,
            error=error,
        )


def sampled_ids(choice: dict[str, Any]) -> list[Any] | None:
    """The sampled ids of a choice, or of one chunk of it, unchecked; None where there are none.

    Gateways that rebuild answers move unknown fields into ``provider_specific_fields``; SGLang may have them in
    ``meta_info`` alone, and llama.cpp in the entries of the log-probs; servers asked for
    ``return_tokens_as_token_ids`` write them into the token texts.
    """
    found = extension(choice, "token_ids")
    if isinstance(found, list):
        return found
    return _ids_of_meta(choice.get("meta_info")) or _ids_of_entries(logprob_entries(choice) or [])


def _ids_of_meta(meta: Any) -> list[Any] | None:
    entries = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list):
        return None
    return [entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in entries]


def _ids_of_entries(entries: list[Any]) -> list[Any] | None:
    if not entries:
        return None
    ids = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
    return ids if all(type(found) is int for found in ids) else _ids_of_texts(entries)


def extension(choice: dict[str, Any], name: str) -> Any:
    """A field of a choice that is not OpenAI's, in either place where it may be."""
    found = choice.get(name)
    if found is not None:
        return found
    moved = choice.get("provider_specific_fields")
    return moved.get(name) if isinstance(moved, dict) else None


def _ids_of_texts(entries: list[Any]) -> list[int] | None:
    texts = [entry.get("token") if isinstance(entry, dict) else None for entry in entries]
    numbers = [text.removeprefix(_ID_PREFIX) for text in texts if isinstance(text, str) and text.startswith(_ID_PREFIX)]
    if len(numbers) != len(texts) or not all(number.isdecimal() for number in numbers):
        return None
    return [int(number) for number in numbers]


def logprob_entries(choice: dict[str, Any]) -> list[Any] | None:
    """One entry per sampled token: ``logprobs.content`` of a chat's choice, or the numbers in
    ``logprobs.token_logprobs`` of a completion's. None where there is no such list.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    found = logprobs.get("content")
    if not isinstance(found, list):
        found = logprobs.get("token_logprobs")
    return found if isinstance(found, list) else None
