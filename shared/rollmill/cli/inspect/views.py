"""What every call of a session became: plain data for drawing and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from rollmill.cli.inspect.differences import Difference, nearest
from rollmill.cli.inspect.recordings import Recording
from rollmill.models import CallKind, CallStatus, CompletionRecord, Trace, TraceTurn, Trajectory, VersionRuns

ReplyKey = tuple[str, int]
"""A reply: completion id and choice."""

Kind = Literal["prompt", "context", "trained", "excluded"]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind."""

    kind: Kind
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TurnView:
    """One sampled reply in a trace, with the context in front of it."""

    completion_id: str
    choice: int
    finish_reason: str | None
    excluded: str | None
    """Reason code of a reply with mask 0; None where it is trained."""
    repaired: bool
    """The next turn saw this reply in other tokens."""
    versions: tuple[tuple[str, int], ...]
    """Policy versions with their numbers of tokens."""
    runs: tuple[Run, ...]
    branches: tuple[TraceView, ...]
    """The traces that start from this reply."""


@dataclass(frozen=True)
class TraceView:
    number: int
    branch: str | None
    break_reason: str | None
    parent: str | None
    difference: Difference | None
    """Where its first prompt differs from the call with the longest common prefix; None for the first trace."""
    drift: int
    finish_reason: str | None
    reward: float | None
    turns: tuple[TurnView, ...]

    def count(self, kind: Kind) -> int:
        return sum(len(run.ids) for turn in self.turns for run in turn.runs if run.kind == kind)


@dataclass(frozen=True)
class LeftOut:
    """A reply, or a call without one, that is in no trace."""

    completion_id: str
    choice: int
    reason: str
    tokens: int
    detail: str | None


@dataclass(frozen=True)
class SessionView:
    session_id: str
    attempt: int
    status: str
    open: bool
    error: str | None
    task: str | None
    builder: str
    from_log: bool
    """Whether the traces are those of the topic ``built``; else they were built here."""
    calls: int
    captured: int
    trained: int
    excluded: tuple[tuple[str, int], ...]
    """Reason codes with their tokens."""
    traces: tuple[TraceView, ...]
    """Traces that start from no other; the others are below a turn."""
    traces_in_all: int
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    @property
    def unaccounted(self) -> int:
        """Tokens that the builder did not account for; its service excludes them as ``builder_dropped``."""
        return self.captured - self.trained - sum(tokens for _, tokens in self.excluded)


def view_of(recording: Recording, built: Trajectory, *, from_log: bool) -> SessionView:
    """The view of a session with the trajectory ``built``."""
    late = tuple(LeftOut(call.completion_id, 0, "late", _tokens(call), None) for call in recording.late)
    return SessionView(
        session_id=recording.session_id,
        attempt=recording.attempt,
        status=str(built.status),
        open=recording.end is None and not from_log,
        error=built.error,
        task=recording.spec.task_id,
        builder=str(built.metadata.get("builder") or recording.spec.builder.strategy),
        from_log=from_log,
        calls=len(recording.calls),
        captured=sum(_tokens(call) for call in recording.calls),
        trained=built.trained_tokens,
        excluded=tuple((item.reason, item.tokens) for item in built.excluded),
        traces=_Forest(recording.calls, built.traces).roots(),
        traces_in_all=len(built.traces),
        left_out=(*_left_out(recording.calls, built), *late),
        notes=recording.notes,
    )


class _Forest:
    """The traces of a session, each below the turn that it starts from."""

    def __init__(self, calls: Sequence[CompletionRecord], traces: Sequence[Trace]) -> None:
        self._calls, self._traces = calls, traces
        replies = {(turn.completion_id, turn.choice) for trace in traces for turn in trace.turns}
        self._below: dict[ReplyKey | None, list[int]] = {}
        for number, trace in enumerate(traces):
            parent = _parent(trace.metadata)
            self._below.setdefault(parent if parent in replies else None, []).append(number)

    def roots(self) -> tuple[TraceView, ...]:
        return tuple(self._trace(number) for number in self._below.get(None, []))

    def _trace(self, number: int) -> TraceView:
        trace, data = self._traces[number], self._traces[number].metadata
        parent = _parent(data)
        reason = data.get("break_reason")
        return TraceView(
            number=number + 1,
            branch=data.get("branch"),
            break_reason=reason,
            parent=None if parent is None else reply_name(*parent),
            difference=nearest(trace, self._calls) if reason else None,
            drift=int(data.get("drift") or 0),
            finish_reason=trace.finish_reason,
            reward=trace.reward,
            turns=tuple(self._turn(trace, before, turn) for before, turn in pairwise((None, *trace.turns)) if turn),
        )

    def _turn(self, trace: Trace, before: TraceTurn | None, turn: TraceTurn) -> TurnView:
        name = turn.completion_id, turn.choice
        return TurnView(
            completion_id=turn.completion_id,
            choice=turn.choice,
            finish_reason=turn.finish_reason,
            excluded=None if turn.trained else turn.reason or "untrained",
            repaired=not turn.context_exact,
            versions=_versions(trace.versions, turn),
            runs=_runs(trace, before, turn),
            branches=tuple(self._trace(number) for number in self._below.get(name, [])),
        )


def reply_name(completion_id: str, choice: int) -> str:
    return completion_id if not choice else f"{completion_id}, choice {choice}"


def _parent(metadata: Mapping[str, Any]) -> ReplyKey | None:
    parent = metadata.get("parent")
    return None if parent is None else (str(parent), int(metadata.get("parent_choice") or 0))


def _runs(trace: Trace, before: TraceTurn | None, turn: TraceTurn) -> tuple[Run, ...]:
    start = 0 if before is None else before.stop
    prompt = Run("prompt", tuple(trace.prompt_ids.tolist() if before is None else ()))
    context = Run("context", tuple(trace.response_ids[start : turn.start].tolist()))
    reply = Run("trained" if turn.trained else "excluded", tuple(trace.response_ids[turn.start : turn.stop].tolist()))
    return tuple(run for run in (prompt, context, reply) if run.ids)


def _versions(runs: VersionRuns, turn: TraceTurn) -> tuple[tuple[str, int], ...]:
    found, position = [], 0
    for version, length in runs:
        low, high = max(position, turn.start), min(position + length, turn.stop)
        position += length
        if version is not None and low < high:
            found.append((str(version), high - low))
    return tuple(found)


def _tokens(record: CompletionRecord) -> int:
    """Sampled tokens of a call; where ids are missing the engine's own count (rule L1)."""
    known = sum(len(choice.token_ids) for choice in record.choices if choice.token_ids is not None)
    counted = not record.choices or any(choice.token_ids is None for choice in record.choices)
    return max(known, record.usage_completion_tokens or 0) if counted else known


def _left_out(calls: Sequence[CompletionRecord], built: Trajectory) -> tuple[LeftOut, ...]:
    """In the order of the calls' starts."""
    used = {(turn.completion_id, turn.choice) for trace in built.traces for turn in trace.turns}
    reasons: dict[ReplyKey, tuple[str, int]] = {}
    for item in built.excluded:
        for unit in item.units:
            _, before = reasons.get((unit.completion_id, unit.choice), ("", 0))
            reasons[unit.completion_id, unit.choice] = item.reason, before + unit.tokens
    found = []
    for record in sorted(calls, key=lambda call: (call.started_at, call.completion_id)):
        for choice in [item.index for item in record.choices] or [0]:
            if (record.completion_id, choice) not in used:
                reason, tokens = reasons.get((record.completion_id, choice), (_implied_reason(record), 0))
                found.append(LeftOut(record.completion_id, choice, reason, tokens, record.error))
    return tuple(found)


def _implied_reason(record: CompletionRecord) -> str:
    """Why a reply without any token is in no trace."""
    if record.kind is CallKind.AUX:
        return "aux"
    if record.status is not CallStatus.OK:
        return str(record.status)
    return "empty_reply" if any(item.token_ids is not None for item in record.choices) else "no_ids"
