"""Questions to an engine's tokenizer.

llama.cpp's server says the ids of a reply and not of its prompt, but renders and tokenises on routes of their own.
The same code with the same input as for the call itself: the engine's own ids, and none made up here. They count only
where they are as many as its usage says.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollmill_capture.model_config import EngineKind
from rollmill_capture.proxy.reasoning_parser import CannotContinueError
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.upstream.client import Target, Upstream, UpstreamError
from rollmill_capture.upstream.formats.parsed_reply import Ids, ParsedReply, as_prompt
from rollmill_capture.upstream.formats.upstream_format import CHAT

LOOKED_UP = {"prompt_ids_from": "tokenize"}
"""Metadata of a record whose prompt's ids were asked for beside the call."""
OK = 200


def is_missing(served: UpstreamRequest, reading: ParsedReply) -> bool:
    """The prompt's ids are worth a question of their own. Without a count to check them against, they are not."""
    asked = served.kind is EngineKind.LLAMA_CPP and served.wire is CHAT and (reading.usage or (0, 0))[0] > 0
    return asked and reading.prompt_ids is None and any(choice.tokens for choice in reading.choices)


async def prompt_ids(upstream: Upstream, target: Target, served: UpstreamRequest) -> Ids | None:
    """The ids of a chat request's prompt; None where the engine does not say them."""
    prompt = (await _ask(upstream, target, "/apply-template", dict(served.fields))).get("prompt")
    if not isinstance(prompt, str):
        return None
    question = {"content": prompt, "add_special": True, "parse_special": True}
    return as_prompt((await _ask(upstream, target, "/tokenize", question)).get("tokens"))


async def sampled_text(upstream: Upstream, target: Target, served: UpstreamRequest, ids: list[int]) -> str:
    """The text of sampled ids, with what a parser has taken out of it, by the engine's ``/detokenize`` (vLLM, SGLang).

    Raises CannotContinueError where it has none.
    """
    if not ids:
        return ""
    found = await _ask(upstream, target, "/detokenize", {"model": served.fields.get("model"), "tokens": ids})
    text = found.get("prompt", found.get("text"))
    if not isinstance(text, str):
        raise CannotContinueError("the engine does not say the text of what was sampled (/detokenize)")
    return text


async def _ask(upstream: Upstream, target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await upstream.post(target, path, orjson.dumps(body))
        found = orjson.loads(answer.content) if answer.status_code == OK else None
    except (UpstreamError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
