"""APIs that engines serve themselves, passed on as they are.

SGLang's ``/generate`` and vLLM's ``/inference/v1/generate`` take ids and return ids. OpenAI Responses and Anthropic
Messages, for a route with them in its `native` (a judge or a teacher behind a provider's own API), are recorded without
ids and never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.apis.openai import (
    META_DETAILS,
    PassthroughFormatter,
    RequestedDetails,
    is_stream,
    number_of_choices,
    passthrough_formatter,
)
from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.upstream.formats.parsed_reply import as_prompt
from rollmill_capture.upstream.formats.upstream_format import SGLANG_GENERATE, VLLM_GENERATE, UpstreamFormat


@dataclass(frozen=True)
class SglangGenerateApi:
    """A call with a prompt of text is served, and not trained: no answer has its ids."""

    name: str = "generate"
    error_format: ErrorFormat = OPENAI

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params, history
        prompt, sampling = body.get("input_ids"), body.get("sampling_params") or {}
        if not isinstance(sampling, dict) or isinstance(body.get("text"), list) or _is_batch(prompt):
            raise InvalidInputError("a batch of prompts is several calls: send them one by one")
        strip = None if body.get("return_logprob") is True else without_meta
        return ParsedRequest(
            SGLANG_GENERATE,
            body,
            PassthroughFormatter(SGLANG_GENERATE, strip=strip),
            is_stream(body),
            number_of_choices(sampling),
            prompt_ids=as_prompt(prompt),
        )


@dataclass(frozen=True)
class VllmGenerateApi:
    """The prompt is always ids."""

    name: str = "tokens"
    error_format: ErrorFormat = OPENAI

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params, history
        prompt, sampling = as_prompt(body.get("token_ids")), body.get("sampling_params") or {}
        if prompt is None or not isinstance(sampling, dict):
            raise InvalidInputError("`token_ids` must be a list of token ids, and `sampling_params` an object")
        formatter = passthrough_formatter(VLLM_GENERATE, RequestedDetails(ids=True, logprobs=True))
        return ParsedRequest(
            VLLM_GENERATE, body, formatter, is_stream(body), number_of_choices(sampling), prompt_ids=prompt
        )


@dataclass(frozen=True)
class NativePassthroughApi:
    """An API of which capture checks nothing but whether a stream is asked for."""

    name: str
    upstream_format: UpstreamFormat
    error_format: ErrorFormat

    def parse_request(self, body: dict[str, Any], params: Mapping[str, Any], history: SessionHistory) -> ParsedRequest:
        del params, history
        formatter = PassthroughFormatter(self.upstream_format, self.error_format)
        return ParsedRequest(self.upstream_format, body, formatter, is_stream(body))


def without_meta(body: Any) -> Any:
    """SGLang's native answers without log-probs; the ids are their content. Changes ``body`` in place."""
    for part in body if isinstance(body, list) else (body,):
        meta = part.get("meta_info") if isinstance(part, dict) else None
        if isinstance(meta, dict):
            for name in META_DETAILS:
                meta.pop(name, None)
    return body


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list)
