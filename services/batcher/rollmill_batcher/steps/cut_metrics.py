"""What a cut counts: members of closed groups by how they ended, traces by length, tokens by staleness, ages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from rollmill.models import Trajectory, TrajectoryStatus
from rollmill_batcher.groups.eligibility import STALE, MemberVerdict, TraceVerdict
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup
from rollmill_batcher.steps.cut_planning import CutPlan
from rollmill_batcher.steps.micro_batches import MicroBatch

LENGTH_BOUNDS = (1024, 4096, 16384, 65536)
"""Upper bounds of the length buckets, in tokens of prompt and response."""
LARGEST_STALENESS = 8
"""Tokens of a higher staleness are counted as ``more``."""


def cut_counts(plan: CutPlan, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """The counts of a cut by name, without those that are 0."""
    counts = {"cuts": 1, "steps": int(bool(plan.step)), "micro_batches": len(batches)}
    counts["fillers"] = sum(batch.filler for batch in batches)
    counts["tokens_batched"] = sum(batch.tokens for batch in batches)
    counts |= {f"excluded_{reason}": tokens for reason, tokens in plan.tokens_excluded.items()}
    counts |= Counter(f"groups_{group.state.value}" for group in plan.closed)
    counts["equal_rewards"] = sum(group.has_equal_rewards for group in plan.closed)
    counts |= _member_counts(plan.closed) | _trace_counts(plan.closed)
    counts |= _staleness_counts(batches[0].staleness if batches else {})
    return {name: count for name, count in counts.items() if count}


def _staleness_counts(tokens: Mapping[int, int]) -> dict[str, int]:
    """``staleness_2``: trained tokens of that staleness; one below 0 (of a version not announced yet) counts as 0."""
    counts = Counter({"token_staleness": sum(max(age, 0) * number for age, number in tokens.items())})
    for age, number in tokens.items():
        counts[f"staleness_{max(age, 0) if age <= LARGEST_STALENESS else 'more'}"] += number
    return dict(counts)


def rollout_ages(members: Iterable[Trajectory], now: float) -> tuple[float, ...]:
    """Seconds since each rollout ended; 0 where the clock of another machine is ahead."""
    return tuple(max(0.0, now - member.closed_at) for member in members)


def _member_counts(closed: Iterable[EvaluatedGroup]) -> dict[str, int]:
    """``rollouts_failed``: graded after an error or a timeout; ``rollouts_ungraded``: the infrastructure failed."""
    members = chain.from_iterable(group.members for group in closed)
    return dict(Counter(filter(None, map(_ending, members))))


def _ending(member: MemberVerdict) -> str | None:
    if member.reward is None:
        return "rollouts_ungraded"
    return None if member.member.status is TrajectoryStatus.COMPLETED else "rollouts_failed"


def _trace_counts(closed: Iterable[EvaluatedGroup]) -> dict[str, int]:
    """``traces_to_4096`` and the ``traces_stale_to_4096`` among them: their quotient is a bucket's drop rate."""
    verdicts = [verdict for group in closed for member in group.members for verdict in member.traces]
    counts = Counter(f"traces_{_bucket(verdict)}" for verdict in verdicts)
    counts.update(f"traces_stale_{_bucket(verdict)}" for verdict in verdicts if verdict.reason == STALE)
    return dict(counts)


def _bucket(verdict: TraceVerdict) -> str:
    length = len(verdict.trace.prompt_ids) + len(verdict.trace.response_ids)
    return next((f"to_{bound}" for bound in LENGTH_BOUNDS if length <= bound), f"above_{LENGTH_BOUNDS[-1]}")
