"""Which members count in a group's statistics, which of their traces train, and why the others do not (RULES A2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rollmill.models import Trace, Trajectory, TrajectoryStatus
from rollmill_batcher.staleness import PolicyClock, Staleness
from rollmill_batcher.tensors import record_bytes

MASKED = "masked"
NO_CONTEXT = "no_context"
TRACE_NOT_GRADED = "trace_not_graded"
TRUNCATED = "truncated"
TOO_LARGE = "too_large"
STALE = "stale"


class Treatment(StrEnum):
    """``train``: counts and trains; ``count``: only counts; ``exclude``: neither."""

    TRAIN = "train"
    COUNT = "count"
    EXCLUDE = "exclude"


@dataclass(frozen=True)
class Treatments:
    """The one table of defaults. Whatever is chosen, a member without a reward neither counts nor trains."""

    error: Treatment = Treatment.COUNT
    """The agent broke down, and the session was graded all the same."""
    timeout: Treatment = Treatment.COUNT
    """The session met its deadline, and what there was is graded."""
    truncated: Treatment = Treatment.TRAIN
    """A trace's last reply met the length limit: it has its reward, and learns from it."""


@dataclass(frozen=True)
class Gate:
    """All limits that a trace has to pass at a cut. ``nbytes``: of one trace in a batch record."""

    treatments: Treatments
    staleness: Staleness
    clock: PolicyClock
    tokens: int
    nbytes: int

    def without_staleness(self) -> Gate:
        return replace(self, staleness=Staleness())


@dataclass(frozen=True)
class TraceVerdict:
    """``reason`` None: the trace trains."""

    index: int
    trace: Trace
    reason: str | None


@dataclass(frozen=True)
class MemberVerdict:
    """``counts``: in the group's statistics, with ``reward``, which is None where nothing graded the rollout."""

    member: Trajectory
    counts: bool
    reward: float | None
    traces: tuple[TraceVerdict, ...]

    @property
    def trained(self) -> tuple[TraceVerdict, ...]:
        return tuple(verdict for verdict in self.traces if verdict.reason is None)


def counts(member: Trajectory, treatments: Treatments) -> bool:
    """Graded, with at least one trace, and not excluded by the table."""
    if member.outcome_reward is None or not member.traces:
        return False
    treatment = _treatment(member, treatments)
    cut_short = treatments.truncated is Treatment.EXCLUDE and any(map(_is_truncated, member.traces))
    return treatment is not Treatment.EXCLUDE and not cut_short


def judge(member: Trajectory, gate: Gate) -> MemberVerdict:
    whole = _member_reason(member, gate.treatments)
    traces = tuple(
        TraceVerdict(index, trace, whole or _trace_reason(trace, gate)) for index, trace in enumerate(member.traces)
    )
    return MemberVerdict(member, counts(member, gate.treatments), member.outcome_reward, traces)


def _treatment(member: Trajectory, treatments: Treatments) -> Treatment:
    by_status = {TrajectoryStatus.ERROR: treatments.error, TrajectoryStatus.TIMEOUT: treatments.timeout}
    return by_status.get(member.status, Treatment.TRAIN)


def _member_reason(member: Trajectory, treatments: Treatments) -> str | None:
    """Why no trace of the member trains, whatever the trace."""
    if member.status is TrajectoryStatus.ERROR and treatments.error is not Treatment.TRAIN:
        return "error"
    if member.outcome_reward is None:
        return f"ungraded:{member.ungraded_reason or 'unknown'}"
    if member.status is TrajectoryStatus.TIMEOUT and treatments.timeout is not Treatment.TRAIN:
        return "timeout"
    return None


def _trace_reason(trace: Trace, gate: Gate) -> str | None:
    return next(_trace_reasons(trace, gate), None)


def _trace_reasons(trace: Trace, gate: Gate) -> Iterator[str]:
    if not trace.trained_tokens:
        yield MASKED
    if not len(trace.prompt_ids) and trace.loss_mask[:1].any():
        yield NO_CONTEXT  # a first token is predicted from nothing
    if trace.reward is None:
        yield TRACE_NOT_GRADED
    if _is_truncated(trace) and gate.treatments.truncated is not Treatment.TRAIN:
        yield TRUNCATED
    if len(trace.prompt_ids) + len(trace.response_ids) > gate.tokens or record_bytes(trace) > gate.nbytes:
        yield TOO_LARGE
    if gate.staleness.drops(gate.clock.age_of(trace)):
        yield STALE


def _is_truncated(trace: Trace) -> bool:
    return trace.finish_reason == "length"
