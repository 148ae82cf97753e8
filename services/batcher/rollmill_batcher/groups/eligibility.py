"""Which members count in a group's statistics, which of their traces train, and why the others do not (rule A2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rollmill.models import TokenRange, Trace, TraceTurn, Trajectory, TrajectoryStatus
from rollmill_batcher.groups.staleness import MaskedTrace, PolicyClock, Staleness, mask_stale_tokens
from rollmill_batcher.sizes import record_bytes

MASKED = "masked"
NO_CONTEXT = "no_context"
TRACE_NOT_GRADED = "trace_not_graded"
TRUNCATED = "truncated"
TOO_LARGE = "too_large"
STALE = "stale"
RAW_LOG_PROBS = "raw_log_probs"
FILTERED_LOG_PROBS = "filtered_log_probs"
NO_TRACES = "no_traces"
UNGRADED = "ungraded"


class Treatment(StrEnum):
    """``train``: counts and trains; ``count``: only counts; ``exclude``: neither."""

    TRAIN = "train"
    COUNT = "count"
    EXCLUDE = "exclude"


@dataclass(frozen=True)
class SamplePolicy:
    """How samples that did not end well are treated. A member without a reward neither counts nor trains at all."""

    error: Treatment = Treatment.COUNT
    """The agent failed, and its session was graded nevertheless."""
    timeout: Treatment = Treatment.COUNT
    """The session met its deadline, and what it had done was graded."""
    truncated: Treatment = Treatment.TRAIN
    """The last reply of a trace met the length limit: its reward is real, and it learns from it."""


@dataclass(frozen=True)
class EligibilityCriteria:
    """What a trace has to satisfy at a cut. ``tokens`` and ``nbytes``: largest size of a trace in a batch record."""

    sample_policy: SamplePolicy
    staleness: Staleness
    clock: PolicyClock
    tokens: int
    nbytes: int
    filtered_log_probs: bool = False
    """True: replies sampled with top_p below 1 train, although a trainer's log-probs are not filtered."""

    def without_staleness(self) -> EligibilityCriteria:
        return replace(self, staleness=Staleness())


@dataclass(frozen=True)
class TraceVerdict:
    """Whether a trace trains: ``reason`` None, it does."""

    index: int
    trace: Trace
    """As it trains: with mask 0 at the tokens of ``stale``."""
    reason: str | None
    stale: tuple[TokenRange, ...] = ()
    """Left out because of their age while the rest of the trace trains."""
    age: float = 0.0
    """By the basis of the staleness limit, over the tokens that train."""

    @property
    def units(self) -> tuple[TokenRange, ...]:
        """What the verdict is about: of a trace that trains, the units that train."""
        units = self.trace.units()
        return tuple(unit for unit in units if unit not in self.stale) if self.stale else units


@dataclass(frozen=True)
class MemberVerdict:
    """``counts``: in the group's statistics, with ``reward``, which is None where the rollout was not graded."""

    member: Trajectory
    counts: bool
    reward: float | None
    traces: tuple[TraceVerdict, ...]

    @property
    def trained(self) -> tuple[TraceVerdict, ...]:
        return tuple(verdict for verdict in self.traces if verdict.reason is None)

    @property
    def failure(self) -> str | None:
        """Why the member does not count: no grade, which is a failure of the infrastructure, or nothing to count.

        None where the policy failed: a wrong answer, a crash or a timeout that was graded counts.
        """
        if self.counts:
            return None
        if self.reward is None:
            return _ungraded(self.member)
        return self.traces[0].reason if self.traces else NO_TRACES


def is_counted(member: Trajectory, sample_policy: SamplePolicy) -> bool:
    """Graded, with at least one trace, and not excluded by ``sample_policy``."""
    if member.outcome_reward is None or not member.traces:
        return False
    treatment = _treatment(member, sample_policy)
    cut_short = sample_policy.truncated is Treatment.EXCLUDE and any(map(_is_truncated, member.traces))
    return treatment is not Treatment.EXCLUDE and not cut_short


def evaluate_member(member: Trajectory, criteria: EligibilityCriteria) -> MemberVerdict:
    """Whether a rollout counts, and which of its traces train."""
    counted = is_counted(member, criteria.sample_policy)
    member_reason = _member_reason(member, criteria.sample_policy) or (None if counted else TRUNCATED)
    traces = tuple(_trace_verdict(index, trace, member_reason, criteria) for index, trace in enumerate(member.traces))
    return MemberVerdict(member, counted, member.outcome_reward, traces)


def _trace_verdict(index: int, trace: Trace, member_reason: str | None, criteria: EligibilityCriteria) -> TraceVerdict:
    reason = member_reason or next(_trace_reasons(trace, criteria), None)
    if reason is not None:
        return TraceVerdict(index, trace, reason)
    masked = _inside_the_limit(trace, criteria)
    if not masked.trace.trained_tokens:
        return TraceVerdict(index, trace, STALE)
    age = criteria.clock.age_of(masked.trace, criteria.staleness.basis)
    return TraceVerdict(index, masked.trace, None, masked.stale, age)


def _inside_the_limit(trace: Trace, criteria: EligibilityCriteria) -> MaskedTrace:
    limit = criteria.staleness.limit
    if not criteria.staleness.masks or limit is None:
        return MaskedTrace(trace, trace.units(), ())
    return mask_stale_tokens(trace, lambda version: criteria.clock.age(version) > limit)


def _treatment(member: Trajectory, sample_policy: SamplePolicy) -> Treatment:
    by_status = {TrajectoryStatus.ERROR: sample_policy.error, TrajectoryStatus.TIMEOUT: sample_policy.timeout}
    return by_status.get(member.status, Treatment.TRAIN)


def _member_reason(member: Trajectory, sample_policy: SamplePolicy) -> str | None:
    """Why no trace of the member trains, whatever the trace."""
    if member.status is TrajectoryStatus.ERROR and sample_policy.error is not Treatment.TRAIN:
        return "error"
    if member.outcome_reward is None:
        return _ungraded(member)
    if member.status is TrajectoryStatus.TIMEOUT and sample_policy.timeout is not Treatment.TRAIN:
        return "timeout"
    return None


def _ungraded(member: Trajectory) -> str:
    return f"{UNGRADED}:{member.ungraded_reason or 'unknown'}"


def _trace_reasons(trace: Trace, criteria: EligibilityCriteria) -> Iterator[str]:
    """All reasons against the trace itself; the first one is reported."""
    if not trace.trained_tokens:
        yield MASKED
    if not len(trace.prompt_ids) and trace.loss_mask[:1].any():
        yield NO_CONTEXT  # a first token without a prompt is predicted from nothing
    if trace.reward is None:
        yield TRACE_NOT_GRADED
    if _is_truncated(trace) and criteria.sample_policy.truncated is not Treatment.TRAIN:
        yield TRUNCATED
    if len(trace.prompt_ids) + len(trace.response_ids) > criteria.tokens or record_bytes(trace) > criteria.nbytes:
        yield TOO_LARGE
    yield from _log_prob_reasons(trace, criteria)
    if criteria.staleness.drops(criteria.clock.age_of(trace, criteria.staleness.basis)):
        yield STALE


def _log_prob_reasons(trace: Trace, criteria: EligibilityCriteria) -> Iterator[str]:
    """Log-probs that a trainer cannot reproduce: taken before the temperature, or after a filter of tokens."""
    trained = [turn for turn in trace.turns if turn.trained]
    if any(turn.logprobs_mode == "raw" and turn.temperature not in (None, 1.0) for turn in trained):
        yield RAW_LOG_PROBS
    if not criteria.filtered_log_probs and any(map(_is_filtered, trained)):
        yield FILTERED_LOG_PROBS


def _is_filtered(turn: TraceTurn) -> bool:
    return turn.logprobs_mode == "processed" and turn.top_p is not None and turn.top_p < 1.0


def _is_truncated(trace: Trace) -> bool:
    return trace.finish_reason == "length"
