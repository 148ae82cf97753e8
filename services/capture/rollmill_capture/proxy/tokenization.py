"""Requests to an engine's tokenizer.

llama.cpp's server returns the ids of a reply and not of its prompt, but renders and tokenizes on routes of their own:
the same code with the same input as for the call itself, so these are the engine's own ids, and none made up here. They
are used only where they are as many as the engine's usage counts.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.proxy.reasoning_parser import CannotContinueError
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.upstream.client import Target, Upstream, UpstreamError
from rollmill_capture.upstream.formats.parsed_reply import Ids, as_prompt

LOOKED_UP = {"prompt_ids_from": "tokenize"}
"""Metadata of a record with prompt ids that were asked for beside the call."""
OK = 200


async def prompt_ids(upstream: Upstream, target: Target, request: UpstreamRequest) -> Ids | None:
    """The ids of a chat request's prompt; None where the engine does not return them."""
    prompt = (await _post(upstream, target, "/apply-template", dict(request.fields))).get("prompt")
    if not isinstance(prompt, str):
        return None
    tokenized = {"content": prompt, "add_special": True, "parse_special": True}
    return as_prompt((await _post(upstream, target, "/tokenize", tokenized)).get("tokens"))


async def sampled_text(upstream: Upstream, target: Target, request: UpstreamRequest, ids: list[int]) -> str:
    """The text of sampled ids, with what a parser has taken out of it, by the engine's ``/detokenize`` (vLLM, SGLang).

    Raises CannotContinueError where it has none.
    """
    if not ids:
        return ""
    found = await _post(upstream, target, "/detokenize", {"model": request.fields.get("model"), "tokens": ids})
    text = found.get("prompt", found.get("text"))
    if not isinstance(text, str):
        raise CannotContinueError("the engine does not return the text of what was sampled (/detokenize)")
    return text


async def _post(upstream: Upstream, target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await upstream.post(target, path, orjson.dumps(body))
        found = orjson.loads(answer.content) if answer.status_code == OK else None
    except (UpstreamError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
