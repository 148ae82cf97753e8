"""OpenAI chat completions: the engine is asked as the client asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill_capture.apis.api import ParsedRequest
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.apis.passthrough_reply import RequestedDetails, passthrough
from rollmill_capture.apis.validation import is_stream, number_of_choices, stream_options
from rollmill_capture.errors import OPENAI, ErrorFormat
from rollmill_capture.upstream.formats.upstream_format import CHAT


class ChatApi:
    name = "chat"
    shape: ErrorFormat = OPENAI

    def read(self, body: dict[str, Any], place: Mapping[str, Any], memory: SessionHistory) -> ParsedRequest:
        del place, memory
        stream, options = is_stream(body), stream_options(body)
        if not isinstance(body.get("messages"), list):
            raise InvalidInputError("`messages` must be a list of messages")
        wants = RequestedDetails(
            ids=body.get("return_token_ids") is True,
            logprobs=body.get("logprobs") is True,
            usage=not stream or options.get("include_usage") is True,
        )
        return ParsedRequest(CHAT, body, passthrough(CHAT, wants), stream, number_of_choices(body))
