"""``per_request``: every call is a trace of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from rollmill.models import Trajectory
from rollmill_builder.merging.branches import Branch, CallTree
from rollmill_builder.merging.closed_session import ClosedSession, ClosedSessionBuilder, no_completions
from rollmill_builder.merging.options import DriftRules, OverLong, Retried, check_choice
from rollmill_builder.merging.parent_search import ParentSearch
from rollmill_builder.merging.prefix_merging import split, trajectory_of_branches
from rollmill_builder.merging.reply_alignment import EndOfTurn
from rollmill_builder.merging.retries import REASON as RETRIED
from rollmill_builder.merging.retries import retried_calls, unheard_replies
from rollmill_builder.merging.sampled_calls import SampledCall, classify_replies
from rollmill_builder.merging.trace_limits import TraceLimit


class PerRequestBuilder(ClosedSessionBuilder):
    """One trace per sampled reply: its prompt as served, its tokens with mask 1.

    ``max_trace_tokens``, ``over_long``: see `rollmill_builder.merging.trace_limits.TraceLimit`; ``cut`` leaves out what
    is too long, since there is no turn to cut at. ``retried``: as in ``prefix_merging``.
    """

    def __init__(
        self, max_trace_tokens: int | None = None, over_long: OverLong = "cut", retried: Retried = "exclude"
    ) -> None:
        check_choice("retried", retried, get_args(Retried))
        self._limit, self._retried = TraceLimit.checked(max_trace_tokens, over_long), retried

    def build_closed(self, closed: ClosedSession) -> Trajectory:
        if not len(closed.calls):
            return no_completions(closed.session, "per_request")
        replies = classify_replies(closed)
        kept, unheard = split(replies.calls, self._unheard(closed, replies.calls))
        branches, over_long = self._limit.apply(Branch((call,)) for call in kept)
        left_out = [*((RETRIED, call) for call in unheard), *(("over_long", call) for call in over_long)]
        return trajectory_of_branches(closed, replies, branches, left_out, "per_request")

    def _unheard(self, closed: ClosedSession, calls: Sequence[SampledCall]) -> frozenset[int]:
        if self._retried == "keep" or not retried_calls(closed):
            return frozenset()
        search = ParentSearch(closed.content.ids.trie, calls, EndOfTurn(None, calls), DriftRules())
        return unheard_replies(closed, calls, CallTree(calls, search))
