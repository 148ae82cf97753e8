"""Which call continues which: decided by token prefixes alone, whatever the order of arrival.

The prompt plus the sampled reply of a call's parent is the longest token prefix of the call's prompt. An earlier call
with a prompt that is a longer prefix still, followed by its reply in other tokens, comes first if
`reply_alignment.align` finds the reply unchanged; then one with a prompt that is a prefix except for the end of its
generation prompt. Clocks play no part, and no prompt is compared: the calls are stored in one trie, where a prefix is
a position on the way to the root.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rollmill_builder.merging.options import DriftRules
from rollmill_builder.merging.reply_alignment import (
    GENERATION_PROMPT,
    Alignment,
    EndOfTurn,
    Mismatch,
    align,
    align_after_prompt_suffix,
    exact_alignment,
)
from rollmill_builder.merging.sampled_calls import SampledCall
from rollmill_builder.storage.trie import TOKEN_BYTES, Trie, TriePosition

T = TypeVar("T")

MAX_CANDIDATES = 4
"""Earlier prompts, the longest first, that are tried as parents: bounds the work where none fits."""


class TrieIndex(Generic[T]):
    """Items by their positions in a trie: on the way from any position to the root, the next one is found at once.

    Several items may have one position, in the order given.
    """

    def __init__(self, trie: Trie, items: Iterable[tuple[TriePosition, T]]) -> None:
        self._items: dict[TriePosition, list[T]] = {}
        for position, item in items:
            self._items.setdefault(position, []).append(item)
        self._ends: dict[int, list[int]] = {}
        """Sorted ends of the indexed positions, by segment."""
        for segment, end in sorted(self._items):
            self._ends.setdefault(segment, []).append(end)
        self._above: list[TriePosition | None] = []
        """For each segment, the indexed position at or above the one where it leaves its parent."""
        for number, branch_point in enumerate(trie.branch_points()):
            self._above.append(self.nearest(branch_point) if number else None)

    def __bool__(self) -> bool:
        return bool(self._items)

    def at(self, position: TriePosition) -> list[T]:
        return self._items.get(position, [])

    def nearest(self, position: TriePosition, *, above: bool = False) -> TriePosition | None:
        """The last indexed position on the way from the root to ``position``, which counts itself unless ``above``."""
        ends = self._ends.get(position.segment, [])
        count = (bisect_left if above else bisect_right)(ends, position.end)
        return TriePosition(position.segment, ends[count - 1]) if count else self._above[position.segment]


@dataclass(frozen=True)
class ParentLink:
    """The place of a call in the tree of calls."""

    parent: SampledCall | None = None
    """The call that this one continues; None where there is none."""
    alignment: Alignment | None = None
    """How to continue the parent's trace; None where that is not allowed."""
    mismatch: Mismatch | None = None
    """Why not, for a call that seems to go on from an earlier one; None where no earlier prompt is a prefix."""


class ParentSearch:
    """The calls of a session, ready to be searched for parents. ``trie`` holds their token ids."""

    def __init__(self, trie: Trie, calls: Sequence[SampledCall], end_of_turn: EndOfTurn, rules: DriftRules) -> None:
        self._trie, self._end_of_turn, self._rules = trie, end_of_turn, rules
        self._ends = TrieIndex(trie, ((call.end, call) for call in calls))
        self._prompts = TrieIndex(trie, ((call.prompt, call) for call in calls))
        self._suffix_forks = TrieIndex(trie, _suffix_forks(trie, calls))

    def siblings(self, call: SampledCall) -> Sequence[SampledCall]:
        """The calls with the same prompt, itself among them, in order."""
        return self._prompts.at(call.prompt)

    def link(self, child: SampledCall) -> ParentLink:
        parent = self._exact_parent(child)
        beyond = 0 if parent is None else parent.end.end
        found = self._drifted_parent(child, beyond)
        if not isinstance(found, ParentLink):
            other = self._parent_but_for_suffix(child, max(beyond, 1)) if self._suffix_forks else None
            if isinstance(other, ParentLink):
                return _within_boundary(replace(other, mismatch=other.mismatch or found), child)
            found = _deepest(item for item in (found, other) if item)
        if isinstance(found, ParentLink):
            return _within_boundary(found, child)
        if parent is None:
            return ParentLink(mismatch=found)
        return _within_boundary(ParentLink(parent, exact_alignment(parent), found), child)

    def _exact_parent(self, child: SampledCall) -> SampledCall | None:
        """The longest prompt plus reply that the child's prompt begins with; the earliest of equals."""
        end = self._ends.nearest(child.prompt)
        return None if end is None else self._ends.at(end)[0]

    def _drifted_parent(self, child: SampledCall, beyond: int) -> ParentLink | Mismatch | None:
        """The deepest call beyond ``beyond`` bytes with a reply that the prompt repeats in other tokens.

        Else the mismatch at the deepest prompt that is a prefix; None where there is no such prompt.
        """
        failed: Mismatch | None = None
        for position in _upwards(self._prompts, child.prompt, beyond):
            results = [(call, self._align(call, child)) for call in self._prompts.at(position)]
            found = [ParentLink(call, result, failed) for call, result in results if isinstance(result, Alignment)]
            if found:
                return found[0]
            failed = failed or _deepest(result for _, result in results if isinstance(result, Mismatch))
        return failed

    def _parent_but_for_suffix(self, child: SampledCall, beyond: int) -> ParentLink | Mismatch | None:
        """The call beyond ``beyond`` bytes with a prompt that is a prefix except for the end of its generation prompt.

        Else the mismatch that gives the reason why not.
        """
        failed: Mismatch | None = None
        for position in _upwards(self._suffix_forks, child.prompt, beyond):
            for call in self._suffix_forks.at(position):
                if self._trie.is_prefix(call.prompt, child.prompt) or not child.may_follow(call):
                    continue
                end = self._end_of_turn.of(call)
                result = align_after_prompt_suffix(call, child, position.end // TOKEN_BYTES, end, self._rules)
                if isinstance(result, Alignment):
                    return ParentLink(call, result, failed)
                failed = failed or (result and replace(result, reason=boundary(call, child) or result.reason))
        return failed

    def _align(self, parent: SampledCall, child: SampledCall) -> Alignment | Mismatch:
        return align(parent, child, self._end_of_turn.of(parent), self._rules)


def _upwards(index: TrieIndex[SampledCall], start: TriePosition, beyond: int) -> Iterator[TriePosition]:
    """Indexed positions above ``start``, the nearest first, beyond ``beyond`` bytes, at most `MAX_CANDIDATES`."""
    position = index.nearest(start, above=True)
    for _ in range(MAX_CANDIDATES):
        if position is None or position.end < beyond:
            return
        yield position
        position = index.nearest(position, above=True)


def _suffix_forks(trie: Trie, calls: Sequence[SampledCall]) -> Iterator[tuple[TriePosition, SampledCall]]:
    """Where other prompts leave a call's prompt inside its generation prompt."""
    forks = set(trie.branch_points()[1:])
    if not forks:
        return
    for call in calls:
        for size in range(1, min(GENERATION_PROMPT, call.prompt_tokens - 1) + 1):
            position = trie.ancestor(call.prompt, call.prompt.end - size * TOKEN_BYTES)
            if position in forks:
                yield position, call


def _deepest(mismatches: Iterable[Mismatch]) -> Mismatch | None:
    return max(mismatches, key=lambda item: item.at, default=None)


def _within_boundary(link: ParentLink, child: SampledCall) -> ParentLink:
    """Sampled by another policy, or rendered by another template or with other tools: a trace of its own (rule A8)."""
    reason = None if link.parent is None or link.alignment is None else boundary(link.parent, child)
    if reason is None or link.alignment is None:
        return link
    return ParentLink(link.parent, mismatch=Mismatch(reason, link.alignment.resume, link.parent))


def boundary(earlier: SampledCall, later: SampledCall) -> str | None:
    """What differs between two calls that a trace may not hold both of; None where nothing does."""
    if earlier.record.policy.name != later.record.policy.name:
        return "policy_changed"
    before, after = earlier.record.fingerprint, later.record.fingerprint
    if before != after and before is not None and after is not None:
        return "fingerprint_changed"
    known = earlier.text is not None and later.text is not None
    return "tools_changed" if known and earlier.tools != later.tools else None
