"""``prefix_merging``: calls that continue each other become one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, get_args

from rollmill.models import Trace, Trajectory
from rollmill.strategies import trajectory_of
from rollmill.strategies.decoding import decoder
from rollmill_builder.merging.branches import Branch, CallTree
from rollmill_builder.merging.closed_session import ClosedSession, ClosedSessionBuilder, no_completions
from rollmill_builder.merging.options import (
    DriftRules,
    OnDrift,
    OnScaffold,
    OverLong,
    Retried,
    Siblings,
    check_choice,
    check_count,
)
from rollmill_builder.merging.parent_search import ParentSearch
from rollmill_builder.merging.reply_alignment import EndOfTurn
from rollmill_builder.merging.retries import REASON as RETRIED
from rollmill_builder.merging.retries import unheard_replies
from rollmill_builder.merging.sampled_calls import SampledCall, SessionReplies, by_reason, classify_replies
from rollmill_builder.merging.trace_assembly import assemble_trace
from rollmill_builder.merging.trace_limits import TraceLimit

LeftOut = tuple[str, SampledCall]
"""A reply that a rule of the configuration leaves out of all traces, after the reason."""


class PrefixMergingBuilder(ClosedSessionBuilder):
    """Merges calls by token prefix into traces; sampled ids are kept raw, and each is trained exactly once.

    ``end_of_turn_token_id``: needed only to repair drift where the records do not show it. ``on_drift``: what to do
    where the next prompt holds a reply in another tokenisation and the reply is the same: ``repair`` keeps the
    sampled ids and drops the copy, ``fork`` starts a new trace, ``fork_over_n`` does so above ``drift_tokens`` sampled
    tokens (rule A10). ``tokenizer``: a tokenizer file, or ``module:callable``, that decides whether a copy is the same
    reply; without one the messages of the next request do. ``on_scaffold``: what to do where the next prompt lacks the
    end of a generation prompt (an empty thinking block): ``fork`` starts a new trace, ``merge`` keeps those tokens in
    front of the reply, although the next reply was sampled without them. ``siblings``: other replies to the same
    prompt that nothing went on from (retries, best of n) are traces of their own (``keep``) or excluded(``sibling``)
    (``exclude``). ``retried``: replies that the client never received, since it sent the same request again (see
    `rollmill_builder.merging.retries`), are excluded(``retried``) (``exclude``), or are siblings as well (``keep``).
    ``max_trace_tokens``, ``over_long``: see `rollmill_builder.merging.trace_limits.TraceLimit`.
    """

    def __init__(
        self,
        end_of_turn_token_id: int | None = None,
        on_drift: OnDrift = "repair",
        drift_tokens: int = 16,
        siblings: Siblings = "keep",
        tokenizer: str | None = None,
        on_scaffold: OnScaffold = "fork",
        max_trace_tokens: int | None = None,
        over_long: OverLong = "cut",
        retried: Retried = "exclude",
    ) -> None:
        check_choice("on_drift", on_drift, get_args(OnDrift))
        check_choice("on_scaffold", on_scaffold, get_args(OnScaffold))
        check_choice("siblings", siblings, get_args(Siblings))
        check_choice("retried", retried, get_args(Retried))
        check_count("drift_tokens", drift_tokens)
        if end_of_turn_token_id is not None:
            check_count("end_of_turn_token_id", end_of_turn_token_id)
        decode = None if tokenizer is None else decoder(tokenizer)
        self._end_of_turn, self._siblings, self._retried = end_of_turn_token_id, siblings, retried
        self._rules = DriftRules(on_drift, drift_tokens, on_scaffold, decode)
        self._limit = TraceLimit.checked(max_trace_tokens, over_long)

    def build_closed(self, closed: ClosedSession) -> Trajectory:
        if not len(closed.calls):
            return no_completions(closed.session, "prefix_merging")
        replies = classify_replies(closed)
        branches, left_out = self._branches(closed, replies.calls)
        branches, over_long = self._limit.apply(branches)
        left_out = [*left_out, *(("over_long", call) for call in over_long)]
        return trajectory_of_branches(closed, replies, branches, left_out, "prefix_merging")

    def _branches(
        self, closed: ClosedSession, calls: Sequence[SampledCall]
    ) -> tuple[tuple[Branch, ...], Sequence[LeftOut]]:
        """The branches, and the calls that are left out of them."""
        tree, kept, left_out = self._tree(closed, calls, calls), calls, list[LeftOut]()
        if self._retried == "exclude":
            kept, unheard = split(kept, unheard_replies(closed, calls, tree))
            left_out += [(RETRIED, call) for call in unheard]
            tree = self._tree(closed, kept, calls) if unheard else tree
        if self._siblings == "exclude":
            kept, unused = split(kept, tree.unused_siblings())
            left_out += [("sibling", call) for call in unused]
            tree = self._tree(closed, kept, calls) if unused else tree
        return tree.branches(), left_out

    def _tree(self, closed: ClosedSession, calls: Sequence[SampledCall], evidence: Sequence[SampledCall]) -> CallTree:
        end_of_turn = EndOfTurn(self._end_of_turn, evidence)
        return CallTree(calls, ParentSearch(closed.content.ids.trie, calls, end_of_turn, self._rules))


def split(calls: Sequence[SampledCall], orders: Container[int]) -> tuple[list[SampledCall], list[SampledCall]]:
    """The calls without those of the given orders, and these."""
    kept = [call for call in calls if call.order not in orders]
    return kept, [call for call in calls if call.order in orders]


def trajectory_of_branches(
    closed: ClosedSession,
    replies: SessionReplies,
    branches: Sequence[Branch],
    left_out: Sequence[LeftOut],
    builder: str,
) -> Trajectory:
    """The trajectory of these branches. ``left_out``: replies that a rule of the configuration left out, and why."""
    traces = traces_of(branches)
    untrained = [(call.untrained, call.units()) for branch in branches for call in branch.calls if call.untrained]
    excluded = [*replies.excluded, *untrained, *((reason, call.units()) for reason, call in left_out)]
    reasons = [*replies.reasons, *(reason for reason, _ in left_out)]
    metadata = {"builder": builder, "records": len(closed.calls), **statistics(traces, reasons)}
    return trajectory_of(closed.session, traces, excluded=by_reason(excluded), metadata=metadata)


def traces_of(branches: Sequence[Branch]) -> tuple[Trace, ...]:
    names = [branch.name for branch in branches]
    branch_of = {call.name: name for branch, name in zip(branches, names, strict=True) for call in branch.calls}
    return tuple(assemble_trace(branch, branch_of) for branch in branches)


def statistics(traces: Sequence[Trace], left_out: Sequence[str]) -> dict[str, Any]:
    """Counts of a session.

    ``replies`` in traces; ``merge_ratio``: traces by replies, 1.0 where nothing merged; ``breaks`` by reason;
    ``drift``: repairs; ``left_out``: replies in no trace by reason, those without a token among them.
    """
    replies = sum(len(trace.turns) for trace in traces)
    breaks = Counter(str(trace.metadata["break_reason"]) for trace in traces if trace.metadata["break_reason"])
    return {
        "replies": replies,
        "merge_ratio": len(traces) / replies if replies else None,
        "breaks": dict(sorted(breaks.items())),
        "drift": sum(int(trace.metadata["drift"]) for trace in traces),
        "left_out": dict(sorted(Counter(left_out).items())),
    }
