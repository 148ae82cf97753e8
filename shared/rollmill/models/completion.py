"""Session events: opened, completion, closed, expired (topic ``completions``), and the session they make."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rollmill.models.base import (
    EventTime,
    FiniteFloat,
    Identifier,
    JsonBytes,
    LogProbs,
    NonNegativeInt,
    PositiveInt,
    Record,
    TokenIds,
)
from rollmill.models.specs import SessionSpec
from rollmill.models.versions import PolicySpan, VersionRun, VersionRuns, total_length


class CallKind(StrEnum):
    """``aux`` calls (titles, judges, warm-up) are recorded and never trained."""

    AGENT = "agent"
    AUX = "aux"


class CallStatus(StrEnum):
    OK = "ok"
    INCOMPLETE = "incomplete"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


class SessionStatus(StrEnum):
    """How an agent's run ended."""

    COMPLETED = "COMPLETED"
    TIMEOUT = "TIMEOUT"
    ERROR = "ERROR"


class SamplingParams(Record):
    """Effective values of what decides the meaning of a log-prob; None means unknown."""

    temperature: FiniteFloat | None = Field(default=None, ge=0)
    top_p: FiniteFloat | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None


class SampledChoice(Record):
    """One sampled reply of a call.

    ``token_ids`` [n] int32 and ``logprobs`` [n] float32 are at token; log-probs are of the sampled tokens only.
    """

    index: NonNegativeInt = 0
    token_ids: TokenIds | None = None
    """None: the engine gave no ids; they are never made up from text."""
    logprobs: LogProbs | None = None
    """None: unknown; such a reply is context, never trained."""
    versions: VersionRuns | None = None
    """Policy version per sampled token; None: all of ``policy.before``."""
    message: JsonBytes | None = None
    """The assistant message as the engine sent it."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    trainable: bool = True
    untrainable_reason: str | None = None
    """Why ``trainable`` is False, e.g. ``no_ids``, ``logprob_unknown``, ``ids_differ_from_usage``."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        count = 0 if self.token_ids is None else len(self.token_ids)
        if self.logprobs is not None and len(self.logprobs) != count:
            raise ValueError(f"{len(self.logprobs)} logprobs for {count} token_ids")
        if self.versions is not None and total_length(self.versions) != count:
            raise ValueError(f"versions cover {total_length(self.versions)} tokens of {count}")
        return self


class SessionEvent(Record):
    """Common to all records of the topic ``completions``; the key is ``session_id``."""

    session_id: Identifier
    attempt: PositiveInt = 1


class SessionOpened(SessionEvent):
    type: Literal["session_opened"] = "session_opened"
    spec: SessionSpec = SessionSpec()
    at: EventTime = 0.0


class CompletionRecord(SessionEvent):
    """One captured model call.

    ``prompt_ids`` [p] int32 is the prompt as the engine saw it. The token ids and log-probs are taken out of
    ``response`` and live in ``choices`` alone.
    """

    type: Literal["completion"] = "completion"
    completion_id: Identifier
    started_at: EventTime = 0.0
    ended_at: EventTime = 0.0
    kind: CallKind = CallKind.AGENT
    status: CallStatus = CallStatus.OK
    http_status: int | None = None
    error: str | None = None
    model: str | None = None
    policy: PolicySpan = PolicySpan()
    sampling: SamplingParams = SamplingParams()
    prompt_ids: TokenIds | None = None
    """None: the engine gave no prompt ids; an empty prompt is never made up."""
    choices: tuple[SampledChoice, ...] = ()
    usage_completion_tokens: NonNegativeInt | None = None
    """The engine's own count over all choices; what is counted where ids are missing (rule L1)."""
    fingerprint: str | None = None
    """Digest of tokenizer, chat template and model; None where unknown."""
    original_request: JsonBytes | None = None
    """The agent's own body; None where it equals ``request`` or was dropped for size."""
    request: JsonBytes | None = None
    """The body served upstream."""
    response: JsonBytes | None = None
    """The engine's answer without ids and log-probs; None for a stream: its message is in ``choices``."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _choices_are_distinct(self) -> Self:
        indexes = [choice.index for choice in self.choices]
        if len(set(indexes)) != len(indexes):
            raise ValueError(f"two choices share one index: {indexes}")
        return self

    def versions_of(self, choice: SampledChoice) -> VersionRuns:
        """Policy version of every sampled token of ``choice``, as run lengths."""
        if choice.versions is not None:
            return choice.versions
        count = 0 if choice.token_ids is None else len(choice.token_ids)
        return (VersionRun(self.policy.before, count),) if count else ()


class SessionClosed(SessionEvent):
    type: Literal["session_closed"] = "session_closed"
    status: SessionStatus = Field(default=SessionStatus.COMPLETED, description="How the session ended.")
    error: str | None = Field(default=None, description="What went wrong, for people.")
    output: JsonBytes | None = Field(default=None, description="What the agent produced, for the evaluators.")
    reward: FiniteFloat | None = Field(
        default=None, description="The caller's own reward, for the evaluator `reported`; null is no reward, never 0.0."
    )
    at: EventTime = 0.0


class SessionExpired(SessionEvent):
    """A timer's record; ignored when the session is closed, or, for ``idle``, when more was seen (rule E2)."""

    type: Literal["session_expired"] = "session_expired"
    reason: Literal["deadline", "idle", "memory_budget"]
    seen: NonNegativeInt
    """Number of completions the session held when the timer fired."""
    at: EventTime


CompletionEvent = Annotated[
    SessionOpened | CompletionRecord | SessionClosed | SessionExpired, Field(discriminator="type")
]
"""Any record of the topic ``completions``."""


class CompletionSession(Record):
    """All records of one run of an agent, sorted by (start, id), whatever order they are given in."""

    session_id: Identifier
    attempt: PositiveInt = 1
    spec: SessionSpec = SessionSpec()
    opened_at: EventTime = 0.0
    closed_at: EventTime = 0.0
    status: SessionStatus = SessionStatus.COMPLETED
    error: str | None = None
    output: JsonBytes | None = None
    reward: FiniteFloat | None = None
    completions: tuple[CompletionRecord, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _sorted(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("completions"):
            records = [CompletionRecord.model_validate(item) for item in data["completions"]]
            records.sort(key=lambda record: (record.started_at, record.completion_id))
            data = {**data, "completions": tuple(records)}
        return data

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens with ids, over all records and choices."""
        return sum(
            int(np.size(choice.token_ids))
            for record in self.completions
            for choice in record.choices
            if choice.token_ids is not None
        )
