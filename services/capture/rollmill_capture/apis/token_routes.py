"""The engines' own routes for ids in, ids out: SGLang's ``/generate``, vLLM's ``/inference/v1/generate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.apis.passthrough_reply import PassthroughFormatter, RequestedDetails, passthrough, without_meta
from rollmill_capture.apis.validation import is_stream, number_of_choices
from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.upstream.formats.logprobs import as_prompt
from rollmill_capture.upstream.formats.upstream_format import GENERATE, TOKENS


@dataclass(frozen=True)
class GenerateApi:
    """SGLang's. A prompt of text is served, and not trained: no answer says its ids."""

    name: str = "generate"
    shape: ErrorFormat = OPENAI

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place, memory
        prompt, sampling = body.get("input_ids"), body.get("sampling_params") or {}
        if not isinstance(sampling, dict) or isinstance(body.get("text"), list) or _is_batch(prompt):
            raise InvalidInputError("a batch of prompts is several calls: send them one by one")
        answer = PassthroughFormatter(GENERATE, strip=None if body.get("return_logprob") is True else without_meta)
        return ParsedRequest(
            GENERATE, body, answer, is_stream(body), number_of_choices(sampling), prompt_ids=as_prompt(prompt)
        )


@dataclass(frozen=True)
class TokensApi:
    """vLLM's. The prompt is always ids."""

    name: str = "tokens"
    shape: ErrorFormat = OPENAI

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place, memory
        prompt, sampling = as_prompt(body.get("token_ids")), body.get("sampling_params") or {}
        if prompt is None or not isinstance(sampling, dict):
            raise InvalidInputError("`token_ids` must be a list of token ids, and `sampling_params` an object")
        answer = passthrough(TOKENS, RequestedDetails(ids=True, logprobs=True))
        return ParsedRequest(TOKENS, body, answer, is_stream(body), number_of_choices(sampling), prompt_ids=prompt)


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list)
