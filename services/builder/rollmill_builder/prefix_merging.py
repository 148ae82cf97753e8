"""``prefix_merging``: calls that continue each other become one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from rollmill.models import CompletionSession, Trace, Trajectory
from rollmill.strategies import BaseTrajectoryBuilder, trajectory_of
from rollmill_builder.assembly import trace_of
from rollmill_builder.branches import Branch, CallTree, Siblings
from rollmill_builder.calls import Call, by_reason, calls_of, refused_units
from rollmill_builder.closing import no_completions
from rollmill_builder.parents import CallIndex
from rollmill_builder.splice import DriftRules, EndOfTurn, OnDrift


class PrefixMergingBuilder(BaseTrajectoryBuilder):
    """Merges calls by token prefix into traces; sampled ids are kept raw, and each is trained exactly once.

    ``end_of_turn_token_id``: needed only to repair drift where the records do not show it. ``on_drift``: what to do
    where the next prompt holds a reply in another tokenisation and the messages carry it unchanged: ``repair`` keeps
    the sampled ids and drops the copy, ``fork`` starts a new trace, ``fork_over_n`` does so above ``drift_tokens``
    sampled tokens (RULES A10). ``siblings``: other replies to the same prompt that nothing went on from (retries,
    best of n) are traces of their own (``keep``) or excluded(``sibling``) (``exclude``).
    """

    def __init__(
        self,
        end_of_turn_token_id: int | None = None,
        on_drift: OnDrift = "repair",
        drift_tokens: int = 16,
        siblings: Siblings = "keep",
    ) -> None:
        _check_choice("on_drift", on_drift, get_args(OnDrift))
        _check_choice("siblings", siblings, get_args(Siblings))
        _check_count("drift_tokens", drift_tokens)
        if end_of_turn_token_id is not None:
            _check_count("end_of_turn_token_id", end_of_turn_token_id)
        self._end_of_turn, self._siblings = end_of_turn_token_id, siblings
        self._rules = DriftRules(on_drift, drift_tokens)

    def build(self, session: CompletionSession) -> Trajectory:
        if not session.completions:
            return no_completions(session, "prefix_merging")
        calls = calls_of(session)
        branches, left_out = self._branches(calls)
        traces = traces_of(branches)
        siblings = [("sibling", call.units()) for call in left_out]
        return trajectory_of(
            session,
            traces,
            excluded=by_reason([*refused_units(session), *untrained_units(branches), *siblings]),
            metadata={"builder": "prefix_merging", **statistics(session, traces)},
        )

    def _branches(self, calls: Sequence[Call]) -> tuple[tuple[Branch, ...], list[Call]]:
        """The branches, and the calls that are left out of them."""
        tree = self._tree(calls, calls)
        if self._siblings == "keep":
            return tree.branches(), []
        unused = tree.unused_siblings()
        kept = [call for call in calls if call.order not in unused]
        return self._tree(kept, calls).branches(), [call for call in calls if call.order in unused]

    def _tree(self, calls: Sequence[Call], evidence: Sequence[Call]) -> CallTree:
        return CallTree(calls, CallIndex(calls, EndOfTurn(self._end_of_turn, evidence), self._rules))


def traces_of(branches: Sequence[Branch]) -> tuple[Trace, ...]:
    branch_of = {call.name: branch.name for branch in branches for call in branch.calls}
    return tuple(trace_of(branch, branch_of) for branch in branches)


def untrained_units(branches: Sequence[Branch]) -> list[tuple[str, tuple[Any, ...]]]:
    """(reason, units) of the replies that are context in a trace."""
    return [(call.untrained, call.units()) for branch in branches for call in branch.calls if call.untrained]


def statistics(session: CompletionSession, traces: Sequence[Trace]) -> dict[str, Any]:
    """Counts of a session: records, replies in traces, traces, their ratio (1.0: nothing merged), breaks, drift."""
    replies = sum(len(trace.turns) for trace in traces)
    breaks = Counter(str(trace.metadata["break_reason"]) for trace in traces if trace.metadata["break_reason"])
    return {
        "records": len(session.completions),
        "replies": replies,
        "merge_ratio": len(traces) / replies if replies else None,
        "breaks": dict(sorted(breaks.items())),
        "drift": sum(int(trace.metadata["drift"]) for trace in traces),
    }


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
