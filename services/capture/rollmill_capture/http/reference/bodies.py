"""Models of the bodies that no endpoint validates by a model of its own. They are for the reference alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rollmill.models import Identifier, PauseMode, PolicyVersion, SessionSpec, SessionState
from rollmill.models.base import FiniteFloat, JsonBytes
from rollmill.models.completion import SessionStatus


class Body(BaseModel):
    """Exactly these fields."""

    model_config = ConfigDict(extra="forbid")


class OpenBody(BaseModel):
    """Further fields, or the whole, of another API: they are passed on to the engine."""

    model_config = ConfigDict(extra="allow")


class OpenSessionRequest(SessionSpec):
    """What a session is, and how it is graded."""

    model_config = ConfigDict(extra="forbid")

    session_id: Identifier | None = Field(default=None, description="Without it, capture chooses one.")
    attempt: PositiveInt | None = Field(
        default=None, description="1, or higher than the attempt before, to run the session anew. Without it: 1."
    )


class CloseSessionRequest(Body):
    """How a session ended."""

    status: SessionStatus | None = Field(default=None, description="How it ended. Without it: COMPLETED.")
    error: str | None = Field(default=None, description="What went wrong, for people.")
    output: JsonBytes | None = Field(
        default=None, description="What the agent produced, for the evaluators. With the tenant's key alone."
    )
    reward: FiniteFloat | None = Field(
        default=None,
        description="The caller's own reward, for the evaluator `reported`; null is no reward, never 0.0. With the "
        "tenant's key alone.",
    )
    attempt: PositiveInt | None = Field(default=None, description="Attempt to close. Without it: the newest.")


class SessionSummary(Body):
    """A session as its tenant knows it."""

    session_id: str = Field(description="Id of the session.")
    attempt: int = Field(description="The session's newest attempt, from 1.")
    state: SessionState = Field(description="Whether it takes calls.")
    base_url: str = Field(description="Base URL for an OpenAI client: its calls belong to the session.")


class SessionOpened(SessionSummary):
    """A session with what an agent needs to make its calls."""

    api_key: str = Field(description="The session's token: the agent's API key. Only this answer has it.")
    environment: dict[str, str] = Field(
        description="Environment variables that point stock SDKs of all APIs at the session."
    )


class SessionShown(SessionSummary):
    """A session with its spec."""

    opened_at: float = Field(description="Seconds since the Unix epoch.")
    spec: SessionSpec | None = Field(description="What the session was opened with; null: it is closed.")


class RewardAccepted(Body):
    """The reward is in the log; the reward-merger joins it."""

    session_id: str = Field(description="Id of the session.")
    attempt: int = Field(description="Attempt that is rewarded.")
    evaluation_id: str = Field(description="Id of the reward; a revision names it in `supersedes`.")
    evaluator: str = Field(description="The evaluator that the reward counts as.")


class PolicyStatus(Body):
    """Whether the calls of a policy wait, and what this replica has of them."""

    policy: str = Field(description="Name of the policy.")
    version: PolicyVersion = Field(description="Newest version, as [epoch, version].")
    kv_maybe_stale: bool = Field(description="Prefix caches may hold keys and values of older weights.")
    paused: bool = Field(description="New calls wait.")
    mode: PauseMode | None = Field(description="What becomes of the calls in flight; null: it is not paused.")
    paused_seconds: float = Field(description="Seconds since the pause began; 0: it is not paused.")
    in_flight: int = Field(description="Calls in flight at this replica.")
    waiting: int = Field(description="Calls of this replica that wait for the end of the pause.")
    replicas_awaited: int | None = Field(default=None, description="After a pause: replicas that are not done with it.")


class ModelCallRequest(OpenBody):
    """A request of OpenAI's API; fields that are not listed are passed on as they are."""

    model: str | None = Field(default=None, description="Chooses the route; a name without one takes the default.")
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")


class ChatRequest(ModelCallRequest):
    """OpenAI's chat completions."""

    messages: list[Any] = Field(description="The conversation so far.")
    tools: list[Any] | None = Field(default=None, description="Tools that the model may call.")
    max_tokens: int | None = Field(default=None, description="Most tokens to sample; it bounds the record, too.")
    temperature: float | None = Field(default=None, description="Temperature of sampling.")
    n: int | None = Field(default=None, description="Number of choices.")


class CompletionRequest(ModelCallRequest):
    """OpenAI's completions."""

    prompt: Any = Field(description="Text, or token ids.")
    max_tokens: int | None = Field(default=None, description="Most tokens to sample.")


class ResponsesRequest(ModelCallRequest):
    """OpenAI's Responses."""

    input: Any = Field(default=None, description="Text, or a list of items.")
    previous_response_id: str | None = Field(default=None, description="Answer of the session that this one follows.")


class MessagesRequest(ModelCallRequest):
    """Anthropic's Messages."""

    messages: list[Any] = Field(description="The conversation so far.")
    max_tokens: int | None = Field(default=None, description="Most tokens to sample.")


class GeminiRequest(OpenBody):
    """Gemini's generateContent and countTokens."""

    contents: list[Any] | None = Field(default=None, description="The conversation so far.")


class GenerateRequest(OpenBody):
    """An engine's own generate route, with token ids in and out."""

    sampling_params: dict[str, Any] | None = Field(default=None, description="Sampling parameters of the engine.")


class ModelAnswer(OpenBody):
    """An answer of the API that was called, as its stock clients read it."""


class ModelList(OpenBody):
    """The models of the upstream, in the API's own shape."""


class TokenCount(Body):
    """Tokens of a prompt; the header `x-rollmill-estimated` marks an estimate."""

    input_tokens: int | None = Field(default=None, description="Anthropic's name of the count.")
    totalTokens: int | None = Field(default=None, description="Gemini's name of the count.")  # noqa: N815  # Gemini's


class OpenAiError(Body):
    """What went wrong."""

    message: str = Field(description="What happened, and what to do.")
    type: str = Field(
        description="authentication_error (401), permission_error (403), not_found_error (404), rate_limit_error "
        "(429), server_error (from 500), invalid_request_error (all others)."
    )
    param: str | None = Field(description="The field or header that is wrong, where one is.")
    code: int = Field(description="The HTTP status.")


class OpenAiErrorAnswer(OpenBody):
    """An error in OpenAI's format."""

    error: OpenAiError


class AnthropicError(Body):
    """What went wrong."""

    type: str = Field(
        description="authentication_error, permission_error, not_found_error, request_too_large, rate_limit_error, "
        "overloaded_error (503), timeout_error (504), api_error (other 5xx), invalid_request_error (all others)."
    )
    message: str = Field(description="What happened, and what to do.")


class AnthropicErrorAnswer(OpenBody):
    """An error in Anthropic's format."""

    type: Literal["error"] = Field(description="Always `error`.")
    error: AnthropicError


class GeminiError(Body):
    """What went wrong."""

    code: int = Field(description="The HTTP status.")
    message: str = Field(description="What happened, and what to do.")
    status: str = Field(description="Google's name of the status, as UNAUTHENTICATED or NOT_FOUND.")


class GeminiErrorAnswer(OpenBody):
    """An error in Gemini's format."""

    error: GeminiError
