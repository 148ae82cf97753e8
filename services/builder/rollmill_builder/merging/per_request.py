"""``per_request``: every call is a trace of its own."""

from __future__ import annotations

from rollmill.models import Trajectory
from rollmill_builder.merging.branches import Branch
from rollmill_builder.merging.closed_session import CallBuilder, ClosedSession
from rollmill_builder.merging.prefix_merging import merged
from rollmill_builder.merging.sampled_calls import sorted_replies
from rollmill_builder.merging.trace_limits import OverLong, TraceLimit
from rollmill_builder.sessions.finalize import no_completions


class PerRequestBuilder(CallBuilder):
    """One trace per sampled reply: its prompt as served, its tokens with mask 1.

    ``max_trace_tokens``, ``over_long``: see `rollmill_builder.merging.trace_limits.TraceLimit`; ``cut`` leaves out what
    is too long, since there is no turn to cut at.
    """

    def __init__(self, max_trace_tokens: int | None = None, over_long: OverLong = "cut") -> None:
        self._limit = TraceLimit.checked(max_trace_tokens, over_long)

    def build_calls(self, ended: ClosedSession) -> Trajectory:
        if not len(ended.log):
            return no_completions(ended.session, "per_request")
        replies = sorted_replies(ended)
        branches, over_long = self._limit.apply(Branch((call,)) for call in replies.calls)
        return merged(ended, replies, branches, [("over_long", call) for call in over_long], "per_request")
