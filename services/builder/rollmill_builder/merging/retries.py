"""Replies that the client never received: it sent the same request again, and the records show it.

Evidence is the request itself (the same prompt, or the same messages) with the same idempotency key, or with a count of
retries (`x-stainless-retry-count`) above an earlier call's. Two calls without it may both have been wanted: best of n.
A reply that a later call goes on from was received, whatever the client sent again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill_builder.merging.branches import CallTree
from rollmill_builder.merging.closed_session import ClosedSession, RecordedCall
from rollmill_builder.merging.sampled_calls import SampledCall
from rollmill_builder.storage.trie import TriePosition

REASON = "retried"

LOOK_BACK = 64
"""Calls before a call among which its earlier tries are looked for: bounds the work where a client counts wrongly."""
MAX_DIGITS = 9


@dataclass(frozen=True)
class _Try:
    """A call, by what identifies its request and which try of it this is."""

    order: int
    completion_id: str
    prompt: TriePosition | None
    messages: TriePosition | None
    key: str | None
    retries: int

    @classmethod
    def of(cls, order: int, call: RecordedCall, closed: ClosedSession) -> _Try:
        metadata, messages = call.record.metadata, closed.content.text.head(call.number)
        key = metadata.get("idempotency_key")
        return cls(
            order,
            call.record.completion_id,
            call.prompt if call.has_prompt_ids else None,
            messages,
            key if isinstance(key, str) and key else None,
            _count(metadata.get("client_retries")),
        )

    def same_request(self, other: _Try) -> bool:
        if self.prompt is not None and other.prompt is not None:
            return self.prompt == other.prompt
        return self.messages is not None and self.messages == other.messages

    def same_key(self, other: _Try) -> bool:
        return self.key is not None and self.key == other.key


def _count(value: Any) -> int:
    """How often a client had tried before, as its header has it; 0 where that is no count."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else 0


def retried_calls(closed: ClosedSession) -> frozenset[str]:
    """Ids of the calls that were made again, as far as the records show."""
    tries = [_Try.of(order, call, closed) for order, call in enumerate(closed.sorted_calls)]
    retried: set[int] = set()
    for later in _with_evidence(tries):
        recent = tries[max(0, later.order - LOOK_BACK) : later.order]
        retried |= set(_earlier_tries(later, recent, retried))
    return frozenset(tries[order].completion_id for order in retried)


def _with_evidence(tries: Sequence[_Try]) -> Iterator[_Try]:
    """The calls that may be a later try: by their count, or because their key came before."""
    keys: set[str] = set()
    for item in tries:
        if item.retries or item.key in keys:
            yield item
        if item.key is not None:
            keys.add(item.key)


def _earlier_tries(later: _Try, earlier: Sequence[_Try], retried: set[int]) -> Iterator[int]:
    """All with its key. Without any, the one that it is most likely the next try of: several clients may have one."""
    same = [item for item in earlier if item.same_request(later)]
    with_key = [item.order for item in same if item.same_key(later)]
    if with_key or not later.retries:
        yield from with_key
        return
    unknown = [item for item in same if item.key is None or later.key is None]
    before = [item for item in unknown if item.retries < later.retries and item.order not in retried]
    if before:
        yield max(before, key=lambda item: (item.retries, item.order)).order


def unheard_replies(closed: ClosedSession, calls: Sequence[SampledCall], tree: CallTree) -> frozenset[int]:
    """Orders of the replies that no client received. ``tree``: of all ``calls``."""
    retried = retried_calls(closed)
    if not retried:
        return frozenset()
    last = {call.end: call.order for call in calls}
    heard = {call.record.completion_id for call in calls if tree.is_continued(call) and last[call.end] == call.order}
    names = retried - heard
    return frozenset(call.order for call in calls if call.record.completion_id in names)
