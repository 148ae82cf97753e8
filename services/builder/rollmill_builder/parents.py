"""Which call continues which: decided by token prefixes alone, whatever the order of arrival.

The parent of a call is the call whose prompt plus sampled reply is the longest token prefix of its prompt. A call
whose prompt is a longer prefix still, but whose reply stands there in other tokens, comes first if `splice.align`
finds the reply unchanged. Clocks play no part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollmill_builder.calls import Call
from rollmill_builder.splice import Break, DriftRules, EndOfTurn, Splice, align, exact, is_exact


@dataclass(frozen=True)
class Link:
    """How a call hangs in the tree of calls."""

    parent: Call | None = None
    """The call whose reply this prompt carries on from; None where there is none."""
    splice: Splice | None = None
    """How to continue the parent's trace; None where that is not allowed."""
    broken: Break | None = None
    """Why not, for a call that seems to go on from an earlier one; None where no earlier prompt is a prefix."""


class CallIndex:
    """The calls of a session, ready to be searched for parents."""

    def __init__(self, calls: Sequence[Call], end_of_turn: EndOfTurn, rules: DriftRules) -> None:
        self._end_of_turn, self._rules = end_of_turn, rules
        self._by_size = sorted(calls, key=lambda call: (call.size, -call.order))
        self._sizes = [call.size for call in self._by_size]
        self._by_prompt: dict[bytes, list[Call]] = {}
        for call in calls:
            self._by_prompt.setdefault(call.prompt, []).append(call)
        self._prompts = sorted(self._by_prompt, key=len)
        self._lengths = [len(prompt) for prompt in self._prompts]

    def siblings(self, call: Call) -> Sequence[Call]:
        """The calls with the same prompt, itself among them, in order."""
        return self._by_prompt[call.prompt]

    def link(self, child: Call) -> Link:
        parent = self._exact_parent(child)
        drifted = self._drifted_parent(child, 0 if parent is None else parent.size)
        if isinstance(drifted, Link):
            return _allowed(drifted, child)
        if parent is None:
            return Link(broken=drifted)
        return _allowed(Link(parent, exact(parent), drifted), child)

    def _exact_parent(self, child: Call) -> Call | None:
        """The longest prompt plus reply that the child's prompt begins with; the earliest of equals."""
        for place in range(bisect_right(self._sizes, len(child.prompt)) - 1, -1, -1):
            if is_exact(self._by_size[place], child):
                return self._by_size[place]
        return None

    def _drifted_parent(self, child: Call, beyond: int) -> Link | Break | None:
        """The deepest call beyond ``beyond`` bytes whose reply the prompt carries in other tokens.

        Else the break at the deepest prompt that is a prefix; None where there is no such prompt.
        """
        failed: Break | None = None
        for prompt in self._prefixes(child, beyond):
            outcomes = [(call, self._aligned(call, child)) for call in self._by_prompt[prompt]]
            found = [Link(call, result) for call, result in outcomes if isinstance(result, Splice)]
            if found:
                return found[0]
            failed = failed or _furthest(result for _, result in outcomes if isinstance(result, Break))
        return failed

    def _prefixes(self, child: Call, beyond: int) -> Iterator[bytes]:
        low, high = bisect_left(self._lengths, beyond), bisect_left(self._lengths, len(child.prompt))
        for place in range(high - 1, low - 1, -1):
            if child.prompt.startswith(self._prompts[place]):
                yield self._prompts[place]

    def _aligned(self, parent: Call, child: Call) -> Splice | Break:
        return align(parent, child, self._end_of_turn.of(parent), self._rules)


def _furthest(breaks: Iterable[Break]) -> Break | None:
    return max(breaks, key=lambda item: item.at, default=None)


def _allowed(link: Link, child: Call) -> Link:
    """Sampled by another policy, or rendered by another template or with other tools: a trace of its own (RULES A8)."""
    reason = None if link.parent is None or link.splice is None else boundary(link.parent, child)
    if reason is None or link.splice is None:
        return link
    return Link(link.parent, broken=Break(reason, link.splice.resume))


def boundary(earlier: Call, later: Call) -> str | None:
    """What differs between two calls that a trace may not hold both of; None where nothing does."""
    if earlier.record.policy.name != later.record.policy.name:
        return "policy_changed"
    fingerprints = {earlier.record.fingerprint, later.record.fingerprint} - {None}
    if len(fingerprints) > 1:
        return "fingerprint_changed"
    known = earlier.messages is not None and later.messages is not None
    return "tools_changed" if known and earlier.tools != later.tools else None
