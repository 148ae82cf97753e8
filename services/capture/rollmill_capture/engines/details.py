"""Ids and log-probs in answers: where they are, so that they can be kept from who did not ask for them."""

from __future__ import annotations

from typing import Any

DETAILS = {"prompt_token_ids", "prompt_logprobs", "token_ids", "output_ids"}
META_DETAILS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")


def without_details(body: Any) -> Any:
    """A body or chunk without ids and log-probs. Changes ``body`` in place: read it before."""
    for part in body if isinstance(body, list) else (body,):
        if isinstance(part, dict):
            _strip(part)
            choices = part.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict):
                    choice.pop("meta_info", None)
                    _strip(choice)
    return body


def _strip(part: dict[str, Any]) -> None:
    for name in part.keys() & DETAILS:
        del part[name]
    if "logprobs" in part:
        part["logprobs"] = None
    if "provider_specific_fields" in part and isinstance(part["provider_specific_fields"], dict):
        part["provider_specific_fields"].pop("token_ids", None)
    if "meta_info" in part and isinstance(part["meta_info"], dict):
        for name in META_DETAILS:
            part["meta_info"].pop(name, None)
