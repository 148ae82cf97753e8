"""Counters of closed groups: members by how they ended, traces by length and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from rollmill.models import TrajectoryStatus
from rollmill_batcher.eligibility import STALE, MemberVerdict, TraceVerdict
from rollmill_batcher.standing import JudgedGroup

LENGTHS = (1024, 4096, 16384, 65536)
"""Upper bounds of the length buckets, in tokens of prompt and response."""


def member_counts(closed: Iterable[JudgedGroup]) -> dict[str, int]:
    """``rollouts_failed``: graded although agent or time ran out; ``rollouts_ungraded``: the infrastructure failed."""
    members = chain.from_iterable(group.members for group in closed)
    return dict(Counter(filter(None, map(_ending, members))))


def _ending(member: MemberVerdict) -> str | None:
    if member.reward is None:
        return "rollouts_ungraded"
    return None if member.member.status is TrajectoryStatus.COMPLETED else "rollouts_failed"


def trace_counts(closed: Iterable[JudgedGroup]) -> dict[str, int]:
    """``traces_to_4096`` and the ``traces_stale_to_4096`` among them: their quotient is a bucket's drop rate."""
    verdicts = [verdict for group in closed for member in group.members for verdict in member.traces]
    counts = Counter(f"traces_{_bucket(verdict)}" for verdict in verdicts)
    counts.update(f"traces_stale_{_bucket(verdict)}" for verdict in verdicts if verdict.reason == STALE)
    return dict(counts)


def _bucket(verdict: TraceVerdict) -> str:
    length = len(verdict.trace.prompt_ids) + len(verdict.trace.response_ids)
    return next((f"to_{bound}" for bound in LENGTHS if length <= bound), f"above_{LENGTHS[-1]}")
