"""OpenAI completions: one prompt as text or ids, or a batch of them; the engine is asked as the client asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.apis.passthrough_reply import RequestedDetails, passthrough
from rollmill_capture.apis.validation import is_stream, number_of_choices, stream_options
from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.upstream.formats.logprobs import as_ids
from rollmill_capture.upstream.formats.upstream_format import COMPLETIONS


class CompletionsApi:
    name = "completions"
    shape: ErrorFormat = OPENAI

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place, memory
        stream, options, prompt = is_stream(body), stream_options(body), body.get("prompt")
        wants = RequestedDetails(
            ids=body.get("return_token_ids") is True,
            logprobs=type(body.get("logprobs")) is int,
            usage=not stream or options.get("include_usage") is True,
        )
        choices = number_of_choices(body) * _prompts(prompt)
        return ParsedRequest(
            COMPLETIONS, body, passthrough(COMPLETIONS, wants), stream, choices, prompt_ids=_ids(prompt)
        )


def _prompts(prompt: Any) -> int:
    """How many prompts there are."""
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise InvalidInputError("`prompt` must be a text, a list of token ids, or a list of such")
    return 1 if isinstance(prompt[0], int) else len(prompt)


def _ids(prompt: Any) -> Any:
    """The one prompt, where it is given as ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return as_ids(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None
