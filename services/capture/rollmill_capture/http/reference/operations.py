"""What each endpoint takes and answers, by the path that the application has it under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from rollmill_capture.http.admin import PauseRequest, ResumeRequest
from rollmill_capture.http.reference import bodies
from rollmill_capture.http.reference.bodies import (
    AnthropicErrorAnswer,
    GeminiErrorAnswer,
    GeminiRequest,
    ModelAnswer,
    ModelList,
    OpenAiErrorAnswer,
    PolicyStatus,
    TokenCount,
)
from rollmill_capture.http.rewards import RewardRequest

REASONS = {
    400: "The request is malformed.",
    401: "A key is missing or unknown, or the session is not named.",
    403: "The key may not do this.",
    404: "There is no such session, model or name; a session of another tenant is one that does not exist.",
    408: "The body came too slowly.",
    409: "It contradicts what is recorded: the session is closed, at another attempt, or was sent other content.",
    413: "The body is too large.",
    415: "The content encoding is not known.",
    422: "A field is wrong; the message names it.",
    429: "A quota or the admission of sessions is exhausted; try again after `retry-after` seconds.",
    502: "The upstream cannot be reached, or its answer cannot be used; the message names its URL.",
    503: "Kafka or the spool takes no record now, or a weight update takes too long; try again.",
    504: "The upstream was silent for too long.",
}
BODY = (400, 408, 413, 415)
CALL = (*BODY, 401, 404, 409, 422, 429, 502, 503, 504)
LOOKUP = (401, 404, 409, 502, 504)
SESSION_KEYS = ("session_token", "tenant_key")


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``keys``: any of them will do; empty: it needs none."""

    summary: str
    tag: str
    keys: tuple[str, ...]
    answers: Mapping[int, type[BaseModel]]
    errors: tuple[int, ...]
    body: type[BaseModel] | None = None
    requires_body: bool = False
    error: type[BaseModel] = OpenAiErrorAnswer
    streams: bool = False
    """Answers are server-sent events where the request asks for a stream."""
    headers: tuple[str, ...] = field(default=())
    """Names of request headers."""


def _call(
    summary: str,
    body: type[BaseModel],
    error: type[BaseModel] = OpenAiErrorAnswer,
    *,
    streams: bool = True,
) -> Operation:
    return Operation(
        summary=summary,
        tag="model calls",
        keys=SESSION_KEYS,
        answers={200: ModelAnswer},
        errors=CALL,
        body=body,
        requires_body=True,
        error=error,
        streams=streams,
        headers=("x-session-id", "x-rollmill-call", "idempotency-key"),
    )


def _lookup(summary: str, error: type[BaseModel] = OpenAiErrorAnswer) -> Operation:
    return Operation(summary, "models", SESSION_KEYS, {200: ModelList}, LOOKUP, error=error)


def _count(summary: str, body: type[BaseModel], error: type[BaseModel]) -> Operation:
    return Operation(
        summary=summary,
        tag="models",
        keys=SESSION_KEYS,
        answers={200: TokenCount},
        errors=(*BODY, 401, 404, 409),
        body=body,
        requires_body=True,
        error=error,
        headers=("x-session-id",),
    )


API_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _call("Chat completion (OpenAI)", bodies.ChatRequest),
    ("POST", "/v1/responses"): _call("Response (OpenAI)", bodies.ResponsesRequest),
    ("POST", "/v1/messages"): _call("Message (Anthropic)", bodies.MessagesRequest, AnthropicErrorAnswer),
    ("POST", "/v1/completions"): _call("Completion (OpenAI)", bodies.CompletionRequest),
    ("POST", "/inference/v1/generate"): _call("Token ids in and out (vLLM)", bodies.GenerateRequest),
    ("POST", "/generate"): _call("Token ids in and out (SGLang)", bodies.GenerateRequest),
    ("GET", "/v1/models"): _lookup("List the upstream's models; no session is needed"),
    ("GET", "/v1/models/{model}"): _lookup("One of the upstream's models"),
    ("GET", "/v1beta/models"): _lookup("List the upstream's models (Gemini)", GeminiErrorAnswer),
    ("POST", "/v1/messages/count_tokens"): _count(
        "Count the tokens of a message (Anthropic)", bodies.MessagesRequest, AnthropicErrorAnswer
    ),
}
for _version in ("v1beta", "v1", "v1alpha"):
    _path = f"/{_version}/models/{{model}}"
    API_OPERATIONS["POST", f"{_path}:generateContent"] = _call(
        "Content (Gemini)", GeminiRequest, GeminiErrorAnswer, streams=False
    )
    API_OPERATIONS["POST", f"{_path}:streamGenerateContent"] = _call(
        "Content as a stream (Gemini)", GeminiRequest, GeminiErrorAnswer
    )
for _version in ("v1beta", "v1"):
    API_OPERATIONS["POST", f"/{_version}/models/{{model}}:countTokens"] = _count(
        "Count the tokens of a request (Gemini)", GeminiRequest, GeminiErrorAnswer
    )
"""Of the paths that every base URL has: the session's address, with and without ``/v1``, and none."""

OWN_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/sessions"): Operation(
        summary="Open a session; the same request again is answered again (200)",
        tag="sessions",
        keys=("tenant_key",),
        answers={201: bodies.SessionOpened, 200: bodies.SessionOpened},
        errors=(*BODY, 401, 404, 409, 422, 429, 503),
        body=bodies.OpenSessionRequest,
    ),
    ("GET", "/v1/sessions/{session_id}"): Operation(
        "Show a session", "sessions", ("tenant_key",), {200: bodies.SessionShown}, (401, 404)
    ),
    ("POST", "/v1/sessions/{session_id}/close"): Operation(
        summary="Close a session, after its calls in flight; the same request again is answered again",
        tag="sessions",
        keys=("tenant_key", "session_token"),
        answers={200: bodies.SessionSummary},
        errors=(*BODY, 401, 403, 404, 409, 422, 503),
        body=bodies.CloseSessionRequest,
    ),
    ("POST", "/v1/sessions/{session_id}/reward"): Operation(
        summary="Reward a session, open or closed; `reward` is short for `outcome_reward`",
        tag="sessions",
        keys=("tenant_key",),
        answers={202: bodies.RewardAccepted},
        errors=(*BODY, 401, 404, 409, 422, 429, 503),
        body=RewardRequest,
        requires_body=True,
    ),
    ("POST", "/admin/policies/{policy}/pause"): Operation(
        summary="Let new calls of a policy wait (200), or not yet at all replicas (202)",
        tag="administration",
        keys=("administrator_key",),
        answers={200: PolicyStatus, 202: PolicyStatus},
        errors=(*BODY, 403, 404, 422, 503),
        body=PauseRequest,
    ),
    ("POST", "/admin/policies/{policy}/resume"): Operation(
        summary="Let the calls of a policy go on, with the version that the engines have now",
        tag="administration",
        keys=("administrator_key",),
        answers={200: PolicyStatus},
        errors=(*BODY, 403, 404, 422, 503),
        body=ResumeRequest,
    ),
    ("GET", "/admin/policies/{policy}/status"): Operation(
        "Show whether a policy is paused", "administration", ("administrator_key",), {200: PolicyStatus}, (403, 404)
    ),
}
