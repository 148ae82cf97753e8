"""Every sampled token of a session is claimed exactly once: by a trace's mask, or by an exclusion with its reason.

What a builder says is checked against the records, not believed: claims twice, of tokens that nobody sampled, or with
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
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.merging.sampled_calls import by_reason, captured_units, refusal, reply_units, untrained_reason

TRAINABLE_STATUSES = frozenset({"incomplete", "client_gone"})
"""Not trained by default; a custom builder may: the tokens and their log-probs are real."""


class AccountingError(RollmillError):
    """A builder's trajectory contradicts the records; the message names where."""


@dataclass(frozen=True)
class Reply:
    """A reply as the records have it; ``tokens`` counts what was captured of it."""

    record: CompletionRecord
    choice: SampledChoice | None
    tokens: int
    prompted: bool

    def units(self, start: int, stop: int) -> tuple[TokenRange, ...]:
        if self.choice is not None and self.choice.token_ids is not None:
            return tuple(reply_units(self.record, self.choice, start, stop))
        index = 0 if self.choice is None else self.choice.index
        return (TokenRange(self.record.completion_id, index, start, stop, self.record.policy.before),)

    @property
    def loss(self) -> str:
        """Reason for tokens of it that the builder says nothing of."""
        untrained = None if self.choice is None else untrained_reason(self.choice)
        return self.refusal or untrained or "builder_dropped"

    @property
    def refusal(self) -> str | None:
        return refusal(self.record, self.choice, prompted=self.prompted)


Replies = Mapping[tuple[str, int], Reply]


class Claim(NamedTuple):
    start: int
    stop: int
    by: str


def settle(session: ClosedSession | CompletionSession, built: Trajectory) -> Trajectory:
    """``built`` with complete exclusions and the records' versions. Raises AccountingError."""
    replies = _replies(session if isinstance(session, ClosedSession) else ClosedSession.of(session))
    traces = tuple(_checked(trace, f"trace {place}", replies) for place, trace in enumerate(built.traces))
    claims: dict[tuple[str, int], list[Claim]] = {}
    excluded = [(item.reason, _normal(item, replies)) for item in built.excluded]
    for name, claim in chain(_trained(traces), _excluded(excluded)):
        claims.setdefault(name, []).append(claim)
    left = [item for name, reply in replies.items() for item in _unclaimed(name, reply, claims.get(name, []))]
    return built.model_copy(update={"traces": traces, "excluded": by_reason([*excluded, *left])})


def _replies(ended: ClosedSession) -> Replies:
    replies: dict[tuple[str, int], Reply] = {}
    for item in ended.calls:
        record = item.record
        choices = {choice.index: choice for choice in record.choices}
        for unit in captured_units(record):
            name = unit.completion_id, unit.choice
            replies[name] = Reply(record, choices.get(unit.choice), unit.stop, item.prompted)
    return replies


def _reply(name: tuple[str, int], where: str, replies: Replies) -> Reply:
    if name not in replies:
        raise AccountingError(f"{where} names completion {name[0]} choice {name[1]}, which holds no sampled tokens")
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
    reason = None if choice is None else reply.refusal or untrained_reason(choice)
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


def _normal(item: ExcludedUnits, replies: Replies) -> tuple[TokenRange, ...]:
    """Excluded units with the records' versions."""
    where = f"excluded({item.reason})"
    spans = ((_reply((unit.completion_id, unit.choice), where, replies), unit) for unit in item.units)
    return tuple(part for reply, unit in spans for part in reply.units(unit.start, unit.stop))


def _trained(traces: tuple[Trace, ...]) -> Iterator[tuple[tuple[str, int], Claim]]:
    for place, trace in enumerate(traces):
        for turn in trace.turns:
            if turn.trained:
                yield (turn.completion_id, turn.choice), Claim(0, turn.stop - turn.start, f"trace {place}")


def _excluded(excluded: list[tuple[str, tuple[TokenRange, ...]]]) -> Iterator[tuple[tuple[str, int], Claim]]:
    for reason, units in excluded:
        for unit in units:
            yield (unit.completion_id, unit.choice), Claim(unit.start, unit.stop, f"excluded({reason})")


def _unclaimed(
    name: tuple[str, int], reply: Reply, claims: list[Claim]
) -> Iterator[tuple[str, tuple[TokenRange, ...]]]:
    """The gaps between claims, with their reason. Raises AccountingError where two claims overlap."""
    position, before = 0, "nothing"
    for claim in [*sorted(claims), Claim(reply.tokens, reply.tokens, "the end")]:
        if claim.start < position:
            raise AccountingError(
                f"completion {name[0]} choice {name[1]}: token {claim.start} is claimed by {before} and by {claim.by}"
            )
        if claim.start > position:
            yield reply.loss, reply.units(position, claim.start)
        position, before = claim.stop, claim.by
