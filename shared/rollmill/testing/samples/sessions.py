"""Completion records and sessions for tests, from the few fields that matter in a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.models import CompletionRecord, CompletionSession, SampledChoice, SessionSpec

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def choice(
    reply: Sequence[int] | None,
    *,
    index: int = 0,
    logprobs: Sequence[float] | str | None = "made up",
    finish: str | None = "stop",
    message: Message | None = None,
    **more: Any,
) -> SampledChoice:
    """A sampled reply. ``logprobs``: made up from the ids unless given; None: the reply has none."""
    if isinstance(logprobs, str):
        logprobs = None if reply is None else [-(token % 97 + 1) / 128 for token in reply]
    return SampledChoice(
        index=index,
        token_ids=None if reply is None else list(reply),
        logprobs=None if logprobs is None else list(logprobs),
        finish_reason=finish,
        message=message,
        **more,
    )


def completion(
    completion_id: str,
    prompt: Sequence[int] | None,
    reply: Sequence[int] | SampledChoice | Sequence[SampledChoice] | None,
    *,
    at: float = 0.0,
    session_id: str = "s1",
    messages: Sequence[Message] | None = None,
    tools: Sequence[Message] | None = None,
    logprobs: Sequence[float] | str | None = "made up",
    finish: str | None = "stop",
    text: str | None = None,
    **more: Any,
) -> CompletionRecord:
    """One call. ``reply``: token ids, or choices made with `choice`; ``text``: the reply as a message."""
    message = None if text is None else assistant(text)
    request = {"messages": messages, "tools": tools}
    return CompletionRecord(
        session_id=session_id,
        completion_id=completion_id,
        started_at=at,
        ended_at=at + 0.5 if at else 0.0,
        prompt_ids=None if prompt is None else list(prompt),
        choices=_choices(reply, logprobs, finish, message),
        request=None if messages is None else {name: item for name, item in request.items() if item is not None},
        **more,
    )


def _choices(
    reply: Sequence[int] | SampledChoice | Sequence[SampledChoice] | None,
    logprobs: Sequence[float] | str | None,
    finish: str | None,
    message: Message | None,
) -> tuple[SampledChoice, ...]:
    if isinstance(reply, SampledChoice):
        return (reply,)
    given = [item for item in reply or () if isinstance(item, SampledChoice)]
    if given:
        return tuple(given)
    ids = None if reply is None else [item for item in reply if isinstance(item, int)]
    return (choice(ids, logprobs=logprobs, finish=finish, message=message),)


def session_of(*records: CompletionRecord, session_id: str = "s1", **more: Any) -> CompletionSession:
    return CompletionSession(session_id=session_id, spec=more.pop("spec", SessionSpec()), completions=records, **more)
