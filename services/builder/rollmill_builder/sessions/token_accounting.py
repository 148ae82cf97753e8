"""Every sampled token of a session is accounted for exactly once: trained by a trace, or excluded with a reason.

A builder's trajectory is checked against the records: tokens accounted for twice, tokens that were never sampled, and
other ids or log-probs than the record's are errors; what it leaves out is excluded as ``builder_dropped``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rollmill.errors import RollmillError
from rollmill.models import (
    CompletionRecord,
    CompletionSession,
    ExcludedUnits,
    SampledChoice,
    TokenRange,
    Trace,
    TraceTurn,
    Trajectory,
    VersionRun,
    append_run,
)
from rollmill.models.sampled_tokens import captured_units, reply_units
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.merging.sampled_calls import by_reason, exclusion_reason, untrained_reason

TRAINABLE_STATUSES = frozenset({"incomplete", "client_gone"})
"""Not trained by default; a custom builder may: the tokens and their log-probs are real."""


class AccountingError(RollmillError):
    """A builder's trajectory contradicts the records; the message names where."""


@dataclass(frozen=True)
class RecordedReply:
    """A reply as the records have it; ``tokens`` counts what was captured of it."""

    record: CompletionRecord
    choice: SampledChoice | None
    tokens: int
    has_prompt_ids: bool

    def units(self, start: int, stop: int) -> tuple[TokenRange, ...]:
        if self.choice is not None and self.choice.token_ids is not None:
            return tuple(reply_units(self.record, self.choice, start, stop))
        index = 0 if self.choice is None else self.choice.index
        return (TokenRange(self.record.completion_id, index, start, stop, self.record.policy.before),)

    @property
    def default_reason(self) -> str:
        """For tokens of it that the trajectory neither trains nor excludes."""
        untrained = None if self.choice is None else untrained_reason(self.choice)
        return self.exclusion_reason or untrained or "builder_dropped"

    @property
    def exclusion_reason(self) -> str | None:
        return exclusion_reason(self.record, self.choice, has_prompt_ids=self.has_prompt_ids)


ReplyName = tuple[str, int]
"""Completion id and choice."""

Replies = Mapping[ReplyName, RecordedReply]


class AccountedRange(NamedTuple):
    """Tokens of a reply that a trace trains or an exclusion names."""

    start: int
    stop: int
    source: str
    """Which trace or exclusion, for messages."""


def account_tokens(session: ClosedSession | CompletionSession, built: Trajectory) -> Trajectory:
    """``built`` with complete exclusions and the records' versions. Raises AccountingError."""
    replies = _replies(session if isinstance(session, ClosedSession) else ClosedSession.of(session))
    traces = tuple(_checked(trace, f"trace {number}", replies) for number, trace in enumerate(built.traces))
    accounted: dict[ReplyName, list[AccountedRange]] = {}
    excluded = [(item.reason, _record_units(item, replies)) for item in built.excluded]
    for name, tokens in chain(_trained(traces), _excluded(excluded)):
        accounted.setdefault(name, []).append(tokens)
    rest = [item for name, reply in replies.items() for item in _unaccounted(name, reply, accounted.get(name, []))]
    return built.model_copy(update={"traces": traces, "excluded": by_reason([*excluded, *rest])})


def _replies(closed: ClosedSession) -> Replies:
    replies: dict[ReplyName, RecordedReply] = {}
    for call in closed.sorted_calls:
        record = call.record
        choices = {choice.index: choice for choice in record.choices}
        for unit in captured_units(record):
            name = unit.completion_id, unit.choice
            replies[name] = RecordedReply(record, choices.get(unit.choice), unit.stop, call.has_prompt_ids)
    return replies


def _reply(name: ReplyName, where: str, replies: Replies) -> RecordedReply:
    if name not in replies:
        raise AccountingError(f"{where} names completion {name[0]} choice {name[1]}, which has no sampled tokens")
    return replies[name]


def _checked(trace: Trace, where: str, replies: Replies) -> Trace:
    trained = [turn for turn in trace.turns if turn.trained]
    for turn in trained:
        _check_turn(trace, turn, f"{where}, tokens {turn.start} to {turn.stop},", replies)
    if sum(turn.stop - turn.start for turn in trained) != trace.trained_tokens:
        raise AccountingError(
            f"{where} has mask 1 on {trace.trained_tokens} tokens, which its trained turns do not cover"
        )
    return trace.model_copy(update={"versions": tuple(_versions(trace, trained, replies))})


def _check_turn(trace: Trace, turn: TraceTurn, where: str, replies: Replies) -> None:
    reply = _reply((turn.completion_id, turn.choice), where, replies)
    choice, span = reply.choice, slice(turn.start, turn.stop)
    reason = None if choice is None else reply.exclusion_reason or untrained_reason(choice)
    if (
        choice is None
        or choice.token_ids is None
        or choice.logprobs is None
        or reason not in {None, *TRAINABLE_STATUSES}
    ):
        raise AccountingError(f"{where} trains completion {turn.completion_id}, which is not trainable: {reason}")
    count = turn.stop - turn.start
    if not np.array_equal(trace.response_ids[span], choice.token_ids[:count]):
        raise AccountingError(f"{where} has other token ids than completion {turn.completion_id}")
    if trace.response_logprobs is None or not np.array_equal(trace.response_logprobs[span], choice.logprobs[:count]):
        raise AccountingError(f"{where} has other log-probs than completion {turn.completion_id}")
    if not trace.loss_mask[span].all():
        raise AccountingError(f"{where} is a trained turn with mask 0")


def _versions(trace: Trace, trained: list[TraceTurn], replies: Replies) -> list[VersionRun]:
    """The records' versions at the trained turns, context elsewhere."""
    runs: list[VersionRun] = []
    position = 0
    for turn in sorted(trained, key=lambda item: item.start):
        append_run(runs, None, turn.start - position)
        for unit in replies[turn.completion_id, turn.choice].units(0, turn.stop - turn.start):
            append_run(runs, unit.version, unit.tokens)
        position = turn.stop
    append_run(runs, None, len(trace.response_ids) - position)
    return runs


def _record_units(item: ExcludedUnits, replies: Replies) -> tuple[TokenRange, ...]:
    """Excluded units with the records' versions."""
    where = f"excluded({item.reason})"
    spans = ((_reply((unit.completion_id, unit.choice), where, replies), unit) for unit in item.units)
    return tuple(part for reply, unit in spans for part in reply.units(unit.start, unit.stop))


def _trained(traces: tuple[Trace, ...]) -> Iterator[tuple[ReplyName, AccountedRange]]:
    for number, trace in enumerate(traces):
        for turn in trace.turns:
            if turn.trained:
                yield (turn.completion_id, turn.choice), AccountedRange(0, turn.stop - turn.start, f"trace {number}")


def _excluded(excluded: list[tuple[str, tuple[TokenRange, ...]]]) -> Iterator[tuple[ReplyName, AccountedRange]]:
    for reason, units in excluded:
        for unit in units:
            yield (unit.completion_id, unit.choice), AccountedRange(unit.start, unit.stop, f"excluded({reason})")


def _unaccounted(
    name: ReplyName, reply: RecordedReply, accounted: list[AccountedRange]
) -> Iterator[tuple[str, tuple[TokenRange, ...]]]:
    """The gaps between the ranges, with their reason. Raises AccountingError where two ranges overlap."""
    position, before = 0, "nothing"
    for tokens in [*sorted(accounted), AccountedRange(reply.tokens, reply.tokens, "the end")]:
        if tokens.start < position:
            raise AccountingError(
                f"completion {name[0]} choice {name[1]}: token {tokens.start} is accounted for twice, "
                f"by {before} and by {tokens.source}"
            )
        if tokens.start > position:
            yield reply.default_reason, reply.units(position, tokens.start)
        position, before = tokens.stop, tokens.source
