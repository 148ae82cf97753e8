"""Which call continues which: decided by token prefixes alone, whatever the order of arrival.

The parent of a call is the call whose prompt plus sampled reply is the longest token prefix of its prompt. A call
whose prompt is a longer prefix still, but whose reply stands there in other tokens, comes first if `splice.align`
finds the reply unchanged; then one whose prompt is a prefix but for the end of its generation prompt. Clocks play no
part, and no prompt is compared: the calls lie in one trie, where a prefix is a place on the way to the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rollmill_builder.merging.reply_alignment import (
    GENERATION_PROMPT,
    Alignment,
    DriftRules,
    EndOfTurn,
    Mismatch,
    align,
    align_after_prompt_suffix,
    exact,
)
from rollmill_builder.merging.sampled_calls import Call
from rollmill_builder.merging.trie_index import TrieIndex
from rollmill_builder.storage.buffer import TOKEN_BYTES
from rollmill_builder.storage.trie import Trie, TriePosition

MOST_LOOKS = 4
"""Earlier prompts, the longest first, whose replies are looked for in a prompt: bounds the work where none fits."""


@dataclass(frozen=True)
class Link:
    """How a call hangs in the tree of calls."""

    parent: Call | None = None
    """The call whose reply this prompt carries on from; None where there is none."""
    splice: Alignment | None = None
    """How to continue the parent's trace; None where that is not allowed."""
    broken: Mismatch | None = None
    """Why not, for a call that seems to go on from an earlier one; None where no earlier prompt is a prefix."""


class CallIndex:
    """The calls of a session, ready to be searched for parents. ``trie`` holds their token ids."""

    def __init__(self, trie: Trie, calls: Sequence[Call], end_of_turn: EndOfTurn, rules: DriftRules) -> None:
        self._trie, self._end_of_turn, self._rules = trie, end_of_turn, rules
        self._ends = TrieIndex(trie, ((call.end, call) for call in calls))
        self._prompts = TrieIndex(trie, ((call.prompt, call) for call in calls))
        self._frames = TrieIndex(trie, _frames(trie, calls))

    def siblings(self, call: Call) -> Sequence[Call]:
        """The calls with the same prompt, itself among them, in order."""
        return self._prompts.at(call.prompt)

    def link(self, child: Call) -> Link:
        parent = self._exact_parent(child)
        beyond = 0 if parent is None else parent.end.end
        found = self._drifted_parent(child, beyond)
        if not isinstance(found, Link):
            framed = self._framed_parent(child, max(beyond, 1)) if self._frames else None
            if isinstance(framed, Link):
                return _allowed(replace(framed, broken=framed.broken or found), child)
            found = _furthest(item for item in (found, framed) if item)
        if isinstance(found, Link):
            return _allowed(found, child)
        if parent is None:
            return Link(broken=found)
        return _allowed(Link(parent, exact(parent), found), child)

    def _exact_parent(self, child: Call) -> Call | None:
        """The longest prompt plus reply that the child's prompt begins with; the earliest of equals."""
        place = self._ends.nearest(child.prompt)
        return None if place is None else self._ends.at(place)[0]

    def _drifted_parent(self, child: Call, beyond: int) -> Link | Mismatch | None:
        """The deepest call beyond ``beyond`` bytes whose reply the prompt carries in other tokens.

        Else the break at the deepest prompt that is a prefix; None where there is no such prompt.
        """
        failed: Mismatch | None = None
        for place in _upwards(self._prompts, child.prompt, beyond):
            outcomes = [(call, self._aligned(call, child)) for call in self._prompts.at(place)]
            found = [Link(call, result, failed) for call, result in outcomes if isinstance(result, Alignment)]
            if found:
                return found[0]
            failed = failed or _furthest(result for _, result in outcomes if isinstance(result, Mismatch))
        return failed

    def _framed_parent(self, child: Call, beyond: int) -> Link | Mismatch | None:
        """The call beyond ``beyond`` bytes whose reply follows in another frame; else the break that says so."""
        failed: Mismatch | None = None
        for place in _upwards(self._frames, child.prompt, beyond):
            for call in self._frames.at(place):
                if self._trie.is_prefix(call.prompt, child.prompt) or not child.may_follow(call):
                    continue
                end = self._end_of_turn.of(call)
                result = align_after_prompt_suffix(call, child, place.end // TOKEN_BYTES, end, self._rules)
                if isinstance(result, Alignment):
                    return Link(call, result, failed)
                failed = failed or (result and replace(result, reason=boundary(call, child) or result.reason))
        return failed

    def _aligned(self, parent: Call, child: Call) -> Alignment | Mismatch:
        return align(parent, child, self._end_of_turn.of(parent), self._rules)


def _upwards(marks: TrieIndex[Call], start: TriePosition, beyond: int) -> Iterator[TriePosition]:
    """Marks above ``start``, the nearest first, as far as ``beyond`` bytes, and no more than a few."""
    place = marks.nearest(start, above=True)
    for _ in range(MOST_LOOKS):
        if place is None or place.end < beyond:
            return
        yield place
        place = marks.nearest(place, above=True)


def _frames(trie: Trie, calls: Sequence[Call]) -> Iterator[tuple[TriePosition, Call]]:
    """Where other prompts leave a call's prompt inside its generation prompt."""
    forks = set(trie.leaves_at()[1:])
    if not forks:
        return
    for call in calls:
        for size in range(1, min(GENERATION_PROMPT, call.prompt_tokens - 1) + 1):
            place = trie.ancestor(call.prompt, call.prompt.end - size * TOKEN_BYTES)
            if place in forks:
                yield place, call


def _furthest(breaks: Iterable[Mismatch]) -> Mismatch | None:
    return max(breaks, key=lambda item: item.at, default=None)


def _allowed(link: Link, child: Call) -> Link:
    """Sampled by another policy, or rendered by another template or with other tools: a trace of its own (rule A8)."""
    reason = None if link.parent is None or link.splice is None else boundary(link.parent, child)
    if reason is None or link.splice is None:
        return link
    return Link(link.parent, broken=Mismatch(reason, link.splice.resume, link.parent))


def boundary(earlier: Call, later: Call) -> str | None:
    """What differs between two calls that a trace may not hold both of; None where nothing does."""
    if earlier.record.policy.name != later.record.policy.name:
        return "policy_changed"
    before, after = earlier.record.fingerprint, later.record.fingerprint
    if before != after and before is not None and after is not None:
        return "fingerprint_changed"
    known = earlier.text is not None and later.text is not None
    return "tools_changed" if known and earlier.tools != later.tools else None
