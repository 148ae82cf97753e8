"""Which path is which API. By base URL the session is in the path; else it comes as header or API key.

SDKs differ in what they put behind a base URL (``/v1/messages``, ``/v1beta/models/…``, ``/chat/completions``), so every
API is found behind the session's address with and without its ``/v1``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from rollmill_capture.apis import anthropic_reply, openai_responses_reply
from rollmill_capture.apis.anthropic_reply import AnthropicApi
from rollmill_capture.apis.api import ApiAdapter
from rollmill_capture.apis.gemini_reply import GeminiApi
from rollmill_capture.apis.native import NativePassthroughApi, SglangGenerateApi, VllmGenerateApi
from rollmill_capture.apis.openai import ChatApi, CompletionsApi
from rollmill_capture.apis.openai_responses_reply import OpenAiResponsesApi
from rollmill_capture.http.model_calls import CallEndpoint, Caller
from rollmill_capture.http.models import ModelsApi
from rollmill_capture.upstream.formats.upstream_format import ANTHROPIC_MESSAGES, OPENAI_RESPONSES

Lookup = Callable[[Request], Awaitable[Response]]

SESSION = "/sessions/{session_id}"
GEMINI_VERSIONS = ("v1beta", "v1", "v1alpha")
BASES = (SESSION, "", f"{SESSION}/v1")


def call_routes(caller: Caller, fenced: Callable[[ASGIApp], ASGIApp]) -> list[BaseRoute]:
    """Routes of all APIs, the most used ones first: they are tried in order. ``fenced`` holds off repeated calls."""
    apis: list[tuple[str, ApiAdapter, ApiAdapter | None]] = [
        ("/v1/chat/completions", ChatApi(), None),
        (
            "/v1/responses",
            OpenAiResponsesApi(),
            NativePassthroughApi("responses", OPENAI_RESPONSES, openai_responses_reply.ERROR_FORMAT),
        ),
        (
            "/v1/messages",
            AnthropicApi(),
            NativePassthroughApi("messages", ANTHROPIC_MESSAGES, anthropic_reply.ERROR_FORMAT),
        ),
        ("/v1/completions", CompletionsApi(), None),
        ("/inference/v1/generate", VllmGenerateApi(), None),
        ("/generate", SglangGenerateApi(), None),
    ]
    for version in GEMINI_VERSIONS:
        apis += [
            (f"/{version}/models/{{model:path}}:generateContent", GeminiApi(streams=False), None),
            (f"/{version}/models/{{model:path}}:streamGenerateContent", GeminiApi(streams=True), None),
        ]
    looks = ModelsApi(caller)
    lookups: list[tuple[str, Lookup, str]] = [
        ("/v1/models", looks.models, "GET"),
        ("/v1/models/{model:path}", looks.model, "GET"),
        ("/v1/messages/count_tokens", looks.count_messages, "POST"),
        ("/v1beta/models", looks.gemini_models, "GET"),
        ("/v1beta/models/{model:path}:countTokens", looks.count_gemini, "POST"),
        ("/v1/models/{model:path}:countTokens", looks.count_gemini, "POST"),
    ]
    endpoints = [(path, fenced(CallEndpoint(caller, api, native))) for path, api, native in apis]
    return [
        *(Route(f"{base}{path}", endpoint, methods=["POST"]) for base in BASES for path, endpoint in endpoints),
        *(Route(f"{base}{path}", lookup, methods=[method]) for base in BASES for path, lookup, method in lookups),
    ]
