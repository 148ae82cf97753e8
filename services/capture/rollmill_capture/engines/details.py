"""Ids and log-probs in answers: where they are, so that they can be kept from who did not ask for them."""

from __future__ import annotations

from typing import Any

DETAILS = ("prompt_token_ids", "prompt_logprobs", "token_ids", "output_ids")
META_DETAILS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")


def without_details(body: Any) -> Any:
    """A body or chunk without ids and log-probs. Changes ``body`` in place: read it before."""
    for part in body if isinstance(body, list) else (body,):
        if isinstance(part, dict):
            _strip(part)
            choices = part.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict):
                    _strip(choice)
                    choice.pop("meta_info", None)
    return body


def _strip(part: dict[str, Any]) -> None:
    for name in DETAILS:
        part.pop(name, None)
    if "logprobs" in part:
        part["logprobs"] = None
    moved, meta = part.get("provider_specific_fields"), part.get("meta_info")
    if isinstance(moved, dict):
        moved.pop("token_ids", None)
    if isinstance(meta, dict):
        for name in META_DETAILS:
            meta.pop(name, None)
