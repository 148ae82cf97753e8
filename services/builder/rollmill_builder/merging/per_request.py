"""``per_request``: every call is a trace of its own."""

from __future__ import annotations

from rollmill.models import Trajectory
from rollmill_builder.merging.branches import Branch
from rollmill_builder.merging.closed_session import ClosedSession, ClosedSessionBuilder, no_completions
from rollmill_builder.merging.options import OverLong
from rollmill_builder.merging.prefix_merging import trajectory_of_branches
from rollmill_builder.merging.sampled_calls import classify_replies
from rollmill_builder.merging.trace_limits import TraceLimit


class PerRequestBuilder(ClosedSessionBuilder):
    """One trace per sampled reply: its prompt as served, its tokens with mask 1.

    ``max_trace_tokens``, ``over_long``: see `rollmill_builder.merging.trace_limits.TraceLimit`; ``cut`` leaves out what
    is too long, since there is no turn to cut at.
    """

    def __init__(self, max_trace_tokens: int | None = None, over_long: OverLong = "cut") -> None:
        self._limit = TraceLimit.checked(max_trace_tokens, over_long)

    def build_closed(self, closed: ClosedSession) -> Trajectory:
        if not len(closed.calls):
            return no_completions(closed.session, "per_request")
        replies = classify_replies(closed)
        branches, over_long = self._limit.apply(Branch((call,)) for call in replies.calls)
        return trajectory_of_branches(
            closed, replies, branches, [("over_long", call) for call in over_long], "per_request"
        )
