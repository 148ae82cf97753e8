"""The wire formats of upstreams: where each is asked, and who reads its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill_capture.upstream.formats import chat, generate, messages, responses
from rollmill_capture.upstream.formats.chat_stream import ChatAssembler
from rollmill_capture.upstream.formats.generate import GenerateAssembler
from rollmill_capture.upstream.formats.messages import MessagesAssembler
from rollmill_capture.upstream.formats.parsed_reply import Ids, ParsedReply
from rollmill_capture.upstream.formats.responses import ResponsesAssembler
from rollmill_capture.upstream.formats.stream import Assembler


@dataclass(frozen=True)
class UpstreamFormat:
    """One format. Readers and assemblers take the prompt as the request gave it, where it gave ids."""

    name: str
    path: str
    """Under the root of the upstream."""
    read_body: Callable[[Any, Ids | None], ParsedReply]
    assembler: Callable[[int, Ids | None], Assembler]
    """Takes the number of choices that were asked for."""
    has_done: bool = True
    """Its streams end with ``[DONE]``."""


CHAT = UpstreamFormat("chat", "/v1/chat/completions", chat.read_body, ChatAssembler)
COMPLETIONS = UpstreamFormat("completions", "/v1/completions", chat.read_body, ChatAssembler)
TOKENS = UpstreamFormat("tokens", "/inference/v1/generate", chat.read_body, ChatAssembler)
GENERATE = UpstreamFormat("generate", "/generate", generate.read_body, GenerateAssembler)
RESPONSES = UpstreamFormat("responses", "/v1/responses", responses.read_body, ResponsesAssembler, has_done=False)
MESSAGES = UpstreamFormat("messages", "/v1/messages", messages.read_body, MessagesAssembler, has_done=False)
