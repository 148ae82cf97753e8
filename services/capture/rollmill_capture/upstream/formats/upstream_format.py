"""The wire formats of upstreams: the path of each, and who parses its answers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill_capture.upstream.formats import anthropic_messages, chat, openai_responses, sglang_generate
from rollmill_capture.upstream.formats.chat_stream import ChatAssembler
from rollmill_capture.upstream.formats.parsed_reply import Ids, ParsedReply, StreamAssembler


@dataclass(frozen=True)
class UpstreamFormat:
    """One format. Parsers and assemblers take the prompt's ids, where the request gave them."""

    name: str
    path: str
    """Under the root of the upstream."""
    parse_body: Callable[[Any, Ids | None], ParsedReply]
    assembler: Callable[[int, Ids | None], StreamAssembler]
    """Takes the number of choices that were asked for."""
    has_done: bool = True
    """Its streams end with ``[DONE]``."""


CHAT = UpstreamFormat("chat", "/v1/chat/completions", chat.parse_body, ChatAssembler)
COMPLETIONS = UpstreamFormat("completions", "/v1/completions", chat.parse_body, ChatAssembler)
VLLM_GENERATE = UpstreamFormat("tokens", "/inference/v1/generate", chat.parse_body, ChatAssembler)
SGLANG_GENERATE = UpstreamFormat(
    "generate", "/generate", sglang_generate.parse_body, sglang_generate.SglangGenerateAssembler
)
OPENAI_RESPONSES = UpstreamFormat(
    "responses",
    "/v1/responses",
    openai_responses.parse_body,
    openai_responses.OpenAiResponsesAssembler,
    has_done=False,
)
ANTHROPIC_MESSAGES = UpstreamFormat(
    "messages",
    "/v1/messages",
    anthropic_messages.parse_body,
    anthropic_messages.AnthropicMessagesAssembler,
    has_done=False,
)
