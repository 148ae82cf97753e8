"""OpenAI chat completions: the engine is asked as the client asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.answer import Ask
from rollmill_capture.apis.checks import is_stream, number_of_choices, stream_options
from rollmill_capture.apis.memory import SessionMemory
from rollmill_capture.apis.same import Wants, same
from rollmill_capture.engines.wires import CHAT
from rollmill_capture.replies import OPENAI, Shape


class ChatApi:
    name = "chat"
    shape: Shape = OPENAI

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionMemory) -> Ask:
        del place, memory
        stream, options = is_stream(body), stream_options(body)
        if not isinstance(body.get("messages"), list):
            raise InvalidInputError("`messages` must be a list of messages")
        wants = Wants(
            ids=body.get("return_token_ids") is True,
            logprobs=body.get("logprobs") is True,
            usage=not stream or options.get("include_usage") is True,
        )
        return Ask(CHAT, body, same(CHAT, wants), stream, number_of_choices(body))
