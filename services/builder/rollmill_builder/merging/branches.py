"""Chains of calls: which child continues its parent's trace, and why every other one starts a new trace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmill_builder.merging.chat_messages import system_prompts
from rollmill_builder.merging.parent_search import ParentLink, ParentSearch, boundary
from rollmill_builder.merging.reply_alignment import Alignment
from rollmill_builder.merging.sampled_calls import SampledCall
from rollmill_builder.storage.trie import TriePosition


@dataclass(frozen=True)
class Branch:
    """Calls of one trace, each continuing the one before; ``alignments[i]`` joins ``calls[i + 1]`` to it."""

    calls: tuple[SampledCall, ...]
    alignments: tuple[Alignment, ...] = ()
    link: ParentLink = field(default_factory=ParentLink)
    """Of the first call."""
    break_reason: str | None = None
    """Why this does not continue another trace; None for the session's first."""
    break_tokens: tuple[int, int] | None = None
    """With ``history_shrunk``: tokens of the call before, and of the shorter prompt."""
    preceding: SampledCall | None = None
    """The call before the first one, where that has no parent: a sub-agent's caller, what a compaction sums up."""
    dropped_tokens: int = 0
    """Tokens of the first prompt that are left out at its front, because of a limit."""
    omitted_replies: int = 0
    """Replies left out behind the last one, because of a limit."""

    @property
    def first(self) -> SampledCall:
        return self.calls[0]

    @property
    def name(self) -> str:
        return branch_name(self.first)


def branch_name(first: SampledCall) -> str:
    """A name made of content: the first call's id, choice and tokens."""
    name = f"{first.record.completion_id}/{first.choice.index}/{first.prompt.end}/"
    digest = hashlib.blake2b(name.encode(), digest_size=6)
    digest.update(first.prompt_ids().tobytes())
    digest.update(first.reply_ids.tobytes())
    return digest.hexdigest()


class CallTree:
    """The calls of a session, each linked to its parent, and the branches that they form."""

    def __init__(self, calls: Sequence[SampledCall], search: ParentSearch) -> None:
        self._calls, self._search = calls, search
        self._links = {call.order: search.link(call) for call in calls}
        self._sizes = self._subtree_sizes()
        self._leading: dict[TriePosition, SampledCall] = {}
        """Of the calls with one prompt, the one with the most calls after it."""

    def is_continued(self, call: SampledCall) -> bool:
        """Whether a later call goes on from its reply."""
        return self._sizes[call.order] > 1

    def unused_siblings(self) -> frozenset[int]:
        """Orders of the calls that shared their prompt with another and that no later call continues."""
        by_prompt: dict[TriePosition, list[SampledCall]] = {}
        for call in self._calls:
            by_prompt.setdefault(call.prompt, []).append(call)
        return frozenset(call.order for siblings in by_prompt.values() for call in self._unused(siblings))

    def _unused(self, siblings: Sequence[SampledCall]) -> Sequence[SampledCall]:
        unused = [call for call in siblings if self._sizes[call.order] == 1]
        if len(unused) < len(siblings):
            return unused
        last = max(unused, key=lambda call: (call.record.started_at, call.name[0], -call.name[1]))
        return [call for call in unused if call is not last]

    def branches(self) -> tuple[Branch, ...]:
        """Each call is in exactly one branch; branches are in the order of their first calls."""
        continuations = self._continuations()
        continuing = {continuation.order for continuation in continuations.values()}
        found: list[Branch] = []
        last_order = -1
        preceding = self._preceding()
        for index, first in enumerate(self._calls):
            if first.order not in continuing:
                chain = _chain(first, continuations)
                before = preceding[index]
                found.append(self._branch(chain, before, self._reason(first, continuations, before, last_order)))
                last_order = max(last_order, chain[-1].order)
        return tuple(found)

    def _preceding(self) -> list[SampledCall | None]:
        """The call before each one in the session; other replies to the same prompt are not before but beside it."""
        found: list[SampledCall | None] = []
        before: SampledCall | None = None
        for call in self._calls:
            same = before is not None and before.prompt == call.prompt
            found.append(found[-1] if same else before)
            before = call
        return found

    def _subtree_sizes(self) -> dict[int, int]:
        """Calls in the subtree of each call, itself included, by order."""
        sizes = {call.order: 1 for call in self._calls}
        for call in sorted(self._calls, key=lambda item: item.prompt.end, reverse=True):
            parent = self._links[call.order].parent
            if parent is not None:
                sizes[parent.order] += sizes[call.order]
        return sizes

    def _continuations(self) -> dict[int, SampledCall]:
        """Parent's order to the child that continues its trace."""
        continuations: dict[int, SampledCall] = {}
        for call in sorted(self._calls, key=self._rank):
            link = self._links[call.order]
            if link.parent is not None and link.alignment is not None:
                continuations.setdefault(link.parent.order, call)
        return continuations

    def _rank(self, call: SampledCall) -> tuple[bool, int, int, int]:
        """Exact before drifted, then the earliest prompt; of one prompt, the reply with most calls after it."""
        alignment = self._links[call.order].alignment
        first = self._search.siblings(call)[0].order
        return alignment is not None and not alignment.exact, first, -self._sizes[call.order], call.order

    def _branch(self, chain: Sequence[SampledCall], before: SampledCall | None, reason: str | None) -> Branch:
        first = chain[0]
        alignments = tuple(
            alignment for call in chain[1:] if (alignment := self._links[call.order].alignment) is not None
        )
        shrunk = before is not None and reason == "history_shrunk"
        sizes = (before.tokens, first.prompt_tokens) if before is not None and shrunk else None
        link = self._links[first.order]
        preceding = before if link.parent is None else None
        return Branch(tuple(chain), alignments, link, reason, break_tokens=sizes, preceding=preceding)

    def _reason(
        self, first: SampledCall, continuations: Mapping[int, SampledCall], before: SampledCall | None, last_order: int
    ) -> str | None:
        link = self._links[first.order]
        if self._is_sibling(first, link, continuations):
            return "sibling"
        if link.mismatch is not None:
            return link.mismatch.reason
        return "fork" if link.parent is not None else root_reason(first, before, last_order)

    def _is_sibling(self, first: SampledCall, link: ParentLink, continuations: Mapping[int, SampledCall]) -> bool:
        """Whether another reply to the same prompt continues the trace, or has more calls after it."""
        continuation = None if link.parent is None else continuations.get(link.parent.order)
        if continuation is not None and continuation.prompt == first.prompt:
            return continuation is not first
        if first.prompt not in self._leading:
            self._leading[first.prompt] = min(self._search.siblings(first), key=self._rank)
        return self._leading[first.prompt] is not first


def _chain(first: SampledCall, continuations: Mapping[int, SampledCall]) -> list[SampledCall]:
    chain = [first]
    while chain[-1].order in continuations:
        chain.append(continuations[chain[-1].order])
    return chain


def root_reason(first: SampledCall, before: SampledCall | None, last_order: int) -> str | None:
    """Why a call continues no earlier one, as far as the records show; None for the session's first.

    ``before`` is the call before it in the session, ``last_order`` the last call (by order) of all earlier branches.
    """
    if before is None:
        return None
    if last_order > first.order:
        return "sub_agent"
    return boundary(before, first) or _rewritten(before, first) or "compaction"


def _rewritten(before: SampledCall, first: SampledCall) -> str | None:
    """The system prompt changed, or the messages continue those of the call before while the tokens do not."""
    if before.messages is None or first.messages is None:
        return None
    if system_prompts(before.messages) != system_prompts(first.messages):
        return "system_changed"
    grown = len(first.messages) > len(before.messages)
    if not grown or first.messages[: len(before.messages)] != before.messages:
        return None
    return "history_shrunk" if first.prompt.end < before.end.end else "prefix_rewritten"
