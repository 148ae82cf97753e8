"""Chains of calls: which child continues its parent's trace, and why every other one starts a new trace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmill_builder.merging.chat_messages import system_prompts
from rollmill_builder.merging.parent_search import ParentLink, ParentSearch, boundary
from rollmill_builder.merging.reply_alignment import Alignment
from rollmill_builder.merging.sampled_calls import Call
from rollmill_builder.storage.trie import TriePosition


@dataclass(frozen=True)
class Branch:
    """Calls of one trace, each continuing the one before; ``alignments[i]`` joins ``calls[i + 1]`` to it."""

    calls: tuple[Call, ...]
    alignments: tuple[Alignment, ...] = ()
    link: ParentLink = field(default_factory=ParentLink)
    """Of the first call."""
    break_reason: str | None = None
    """Why this does not continue another trace; None for the session's first."""
    break_tokens: tuple[int, int] | None = None
    """With ``history_shrunk``: the tokens up to then, and those of the shorter prompt."""
    preceding: Call | None = None
    """The call before the first one, where that has no parent: a sub-agent's caller, what a compaction sums up."""
    dropped_tokens: int = 0
    """Tokens left out in front of the first prompt, because of a limit."""
    omitted_replies: int = 0
    """Replies left out behind the last one, because of a limit."""

    @property
    def first(self) -> Call:
        return self.calls[0]

    @property
    def name(self) -> str:
        return branch_name(self.first)


def branch_name(first: Call) -> str:
    """A name made of content: the first call's id, choice and tokens."""
    name = f"{first.record.completion_id}/{first.choice.index}/{first.prompt.end}/"
    digest = hashlib.blake2b(name.encode(), digest_size=6)
    digest.update(first.prompt_ids().tobytes())
    digest.update(first.reply_ids.tobytes())
    return digest.hexdigest()


class CallTree:
    """The calls of a session with their links; makes branches of them."""

    def __init__(self, calls: Sequence[Call], search: ParentSearch) -> None:
        self._calls, self._search = calls, search
        self._links = {call.order: search.link(call) for call in calls}
        self._sizes = self._subtree_sizes()
        self._leading: dict[TriePosition, Call] = {}
        """Of the calls with one prompt, the one with the most calls after it."""

    def unused_siblings(self) -> frozenset[int]:
        """Orders of the calls that shared their prompt with another and that no later call continues."""
        by_prompt: dict[TriePosition, list[Call]] = {}
        for call in self._calls:
            by_prompt.setdefault(call.prompt, []).append(call)
        return frozenset(call.order for siblings in by_prompt.values() for call in self._unused(siblings))

    def _unused(self, siblings: Sequence[Call]) -> Sequence[Call]:
        left = [item for item in siblings if self._sizes[item.order] == 1]
        if len(left) < len(siblings):
            return left
        last = max(left, key=lambda item: (item.record.started_at, item.name[0], -item.name[1]))
        return [item for item in left if item is not last]

    def branches(self) -> tuple[Branch, ...]:
        """Every call in exactly one branch; branches in the order of their first calls."""
        continuations = self._continuations()
        continuing = {continuation.order for continuation in continuations.values()}
        found: list[Branch] = []
        last_order = -1
        for index, first in enumerate(self._calls):
            if first.order not in continuing:
                chain = _chain(first, continuations)
                before = self._calls[index - 1] if index else None
                found.append(self._branch(chain, before, self._reason(first, continuations, before, last_order)))
                last_order = max(last_order, chain[-1].order)
        return tuple(found)

    def _subtree_sizes(self) -> dict[int, int]:
        sizes = {call.order: 1 for call in self._calls}
        for call in sorted(self._calls, key=lambda item: item.prompt.end, reverse=True):
            parent = self._links[call.order].parent
            if parent is not None:
                sizes[parent.order] += sizes[call.order]
        return sizes

    def _continuations(self) -> dict[int, Call]:
        """Parent's order to the child that continues its trace."""
        continuations: dict[int, Call] = {}
        for call in sorted(self._calls, key=self._rank):
            link = self._links[call.order]
            if link.parent is not None and link.alignment is not None:
                continuations.setdefault(link.parent.order, call)
        return continuations

    def _rank(self, call: Call) -> tuple[bool, int, int, int]:
        """Exact before drifted, then the earliest prompt; of one prompt, the reply with most calls after it."""
        alignment = self._links[call.order].alignment
        first = self._search.siblings(call)[0].order
        return alignment is not None and not alignment.exact, first, -self._sizes[call.order], call.order

    def _branch(self, chain: Sequence[Call], before: Call | None, reason: str | None) -> Branch:
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
        self, first: Call, continuations: Mapping[int, Call], before: Call | None, last_order: int
    ) -> str | None:
        link = self._links[first.order]
        if self._is_sibling(first, link, continuations):
            return "sibling"
        if link.mismatch is not None:
            return link.mismatch.reason
        return "fork" if link.parent is not None else root_reason(first, before, last_order)

    def _is_sibling(self, first: Call, link: ParentLink, continuations: Mapping[int, Call]) -> bool:
        """Whether another reply to the same prompt continues the trace, or has more calls after it."""
        continuation = None if link.parent is None else continuations.get(link.parent.order)
        if continuation is not None and continuation.prompt == first.prompt:
            return continuation is not first
        if first.prompt not in self._leading:
            self._leading[first.prompt] = min(self._search.siblings(first), key=self._rank)
        return self._leading[first.prompt] is not first


def _chain(first: Call, continuations: Mapping[int, Call]) -> list[Call]:
    chain = [first]
    while chain[-1].order in continuations:
        chain.append(continuations[chain[-1].order])
    return chain


def root_reason(first: Call, before: Call | None, last_order: int) -> str | None:
    """Why a call goes on from no earlier one, as far as the records show; None for the session's first.

    ``before`` is the call before it in the session, ``last_order`` the last call (by order) of all earlier branches.
    """
    if before is None:
        return None
    if last_order > first.order:
        return "sub_agent"
    return boundary(before, first) or _rewritten(before, first) or "compaction"


def _rewritten(before: Call, first: Call) -> str | None:
    """The system prompt changed, or the messages go on from the call before while its tokens do not."""
    if before.messages is None or first.messages is None:
        return None
    if system_prompts(before.messages) != system_prompts(first.messages):
        return "system_changed"
    grown = len(first.messages) > len(before.messages)
    if not grown or first.messages[: len(before.messages)] != before.messages:
        return None
    return "history_shrunk" if first.prompt.end < before.end.end else "prefix_rewritten"
