"""Token ids and log-probs as engines write them, with every way they can be missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollmill_capture.upstream.formats.parsed_reply import Ids

SENTINEL = -9999.0
"""vLLM's value for a missing log-prob, and its lower clamp: no evidence either way."""
HIGHEST = 1.0
"""Rounding may lift a log-prob a little over 0; beyond this it is none."""

MAX_ID = 2**31 - 1
_AS_ID = "token_id:"


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


def sampled_ids(choice: dict[str, Any]) -> list[Any] | None:
    """The sampled ids of a choice, or of one chunk of it, unchecked; None where there are none.

    Gateways that rebuild answers move unknown fields into ``provider_specific_fields``; SGLang may have them in
    ``meta_info`` alone, and llama.cpp in the entries of the log-probs; servers asked for
    ``return_tokens_as_token_ids`` write them into the token texts.
    """
    found = extra(choice, "token_ids")
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


def extra(choice: dict[str, Any], name: str) -> Any:
    """A field of a choice that is not OpenAI's, in either place where it may be."""
    found = choice.get(name)
    if found is not None:
        return found
    moved = choice.get("provider_specific_fields")
    return moved.get(name) if isinstance(moved, dict) else None


def _ids_of_texts(entries: list[Any]) -> list[int] | None:
    texts = [entry.get("token") if isinstance(entry, dict) else None for entry in entries]
    numbers = [text.removeprefix(_AS_ID) for text in texts if isinstance(text, str) and text.startswith(_AS_ID)]
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


def logprob_of(entry: object) -> float:
    """The log-prob of one entry, or of a bare number; NaN where it is unknown."""
    value = entry.get("logprob") if isinstance(entry, dict) else entry
    if type(value) is not float and type(value) is not int:
        return math.nan
    return float(value) if SENTINEL < value <= HIGHEST else math.nan
