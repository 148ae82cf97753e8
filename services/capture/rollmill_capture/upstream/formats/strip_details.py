"""Ids and log-probs in answers: where they are, so that they can be kept from who did not ask for them."""

from __future__ import annotations

from typing import Any

from rollmill_capture.upstream.formats.chat import choices_of

IDS = {"prompt_token_ids", "token_ids", "output_ids"}
META_DETAILS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")


def without_details(body: Any) -> Any:
    """A body or chunk without ids and log-probs. Changes ``body`` in place: read it before."""
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
        for name in part.keys() & IDS:
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
