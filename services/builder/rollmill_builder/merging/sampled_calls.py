"""The sampled replies of a session: one `SampledCall` each, and the reasons that keep a reply out of traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    ExcludedUnits,
    SampledChoice,
    TokenRange,
    VersionRuns,
)
from rollmill.models.sampled_tokens import counted_units, reply_units
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.storage.call_parts import (
    SEPARATOR,
    Message,
    messages_of_text,
    parse_object,
)
from rollmill_builder.storage.call_store import CallContent
from rollmill_builder.storage.trie import TOKEN_BYTES, TriePosition

Ids = npt.NDArray[np.int32]

LOWEST_LOGPROB = -1000.0
"""Engines write -9999 for "unknown"; no sampled token is that unlikely."""
HIGHEST_LOGPROB = 1e-3
"""Above zero by more than rounding: not a log-probability."""


@dataclass(frozen=True, eq=False)
class SampledCall:
    """One sampled reply with its prompt; ``order`` is its rank by (start, completion id, choice)."""

    record: CompletionRecord
    """Prompt and request may be left out of it."""
    choice: SampledChoice
    order: int
    prompt: TriePosition
    """End of the prompt in the trie of token ids; ``prompt.end`` counts its bytes."""
    end: TriePosition
    """End of prompt and reply together."""
    untrained: str | None
    """Why the reply is context with mask 0; None where it is trained."""
    content: CallContent
    number: int
    """Of the call in ``content``."""

    @property
    def name(self) -> tuple[str, int]:
        return self.record.completion_id, self.choice.index

    @property
    def reply_ids(self) -> Ids:
        assert self.choice.token_ids is not None  # noqa: S101  # `classify_replies` takes no reply without ids
        return self.choice.token_ids

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.end // TOKEN_BYTES

    @property
    def tokens(self) -> int:
        """Of prompt and reply together."""
        return self.end.end // TOKEN_BYTES

    def prompt_ids(self, start: int = 0) -> Ids:
        """The prompt's token ids from ``start`` on."""
        return np.frombuffer(self.content.ids.trie.read(self.prompt, start * TOKEN_BYTES), dtype="<i4")

    @property
    def versions(self) -> VersionRuns:
        return self.record.versions_of(self.choice)

    def units(self) -> tuple[TokenRange, ...]:
        return tuple(reply_units(self.record, self.choice))

    @property
    def text(self) -> TriePosition | None:
        """Of the request's messages; None where it holds none."""
        return self.content.text.head(self.number)

    @cached_property
    def messages(self) -> tuple[Message, ...] | None:
        """Of the request; None where it holds none."""
        return None if self.text is None else messages_of_text(self.content.text.trie.read(self.text))

    @property
    def messages_json(self) -> bytes | None:
        """The same as canonical JSON."""
        return None if self.text is None else b"[%s]" % self.content.text.trie.read(self.text).removesuffix(SEPARATOR)

    @cached_property
    def message(self) -> Message | None:
        """The reply as a message; None where the record holds none."""
        return parse_object(self.choice.message)

    @property
    def tools(self) -> bytes | None:
        """Canonical JSON of the request's tools; None where there are none."""
        return self.content.entries[self.number].tools

    def may_follow(self, before: SampledCall) -> bool:
        """Whether the messages begin with those of ``before``, or that is unknown."""
        if self.text is None or before.text is None:
            return True
        return self.content.text.trie.is_prefix(before.text, self.text)

    def messages_after(self, before: SampledCall) -> tuple[Message, ...] | None:
        """The messages that come after those of ``before``; None where one of the two is unknown."""
        if self.text is None or before.text is None:
            return None
        trie = self.content.text.trie
        if trie.is_prefix(before.text, self.text):
            return messages_of_text(trie.read(self.text, before.text.end))
        return (self.messages or ())[len(before.messages or ()) :]


Excluded = tuple[str, tuple[TokenRange, ...]]
"""A reason, and the units it excludes."""


@dataclass(frozen=True)
class SessionReplies:
    """The replies of a session: those that traces are made of, in order, and the excluded ones."""

    calls: tuple[SampledCall, ...]
    excluded: tuple[Excluded, ...]
    reasons: tuple[str, ...]
    """Of each excluded reply; some of them have no tokens."""


def classify_replies(closed: ClosedSession) -> SessionReplies:
    """The replies that belong in traces, and the others with their reasons."""
    calls: list[SampledCall] = []
    excluded: list[Excluded] = []
    reasons: list[str] = []
    choices = [choice for item in closed.sorted_calls for choice in item.record.choices]
    logprobs_valid = all_logprobs_valid([choice.logprobs for choice in choices if choice.logprobs is not None])
    for item in closed.sorted_calls:
        record = item.record
        pairs = zip(record.choices, closed.content.ids.tails(item.number), strict=True)
        for choice, end in sorted(pairs, key=_index) if len(record.choices) > 1 else pairs:
            reason = exclusion_reason(record, choice, has_prompt_ids=item.has_prompt_ids)
            if reason is None and item.prompt is not None and end is not None:
                why = untrained_reason(choice, logprobs_valid=logprobs_valid)
                calls.append(
                    SampledCall(record, choice, len(calls), item.prompt, end, why, closed.content, item.number)
                )
            elif reason is not None:
                reasons.append(reason)
                excluded.append((reason, tuple(reply_units(record, choice))))
        if not record.choices:
            reasons.append(exclusion_reason(record, None) or "no_ids")
        if record.usage_completion_tokens is not None:
            excluded.append((exclusion_reason(record, None) or "no_ids", tuple(counted_units(record))))
    return SessionReplies(tuple(calls), tuple(excluded), tuple(reasons))


def _index(pair: tuple[SampledChoice, TriePosition | None]) -> int:
    return pair[0].index


def exclusion_reason(
    record: CompletionRecord, choice: SampledChoice | None, *, has_prompt_ids: bool | None = None
) -> str | None:
    """Why a reply belongs in no trace; None where it does. ``choice`` None: the call gave no reply at all.

    ``has_prompt_ids``: whether the ids of the prompt are known; None: the record itself shows it.
    """
    if record.kind is CallKind.AUX:
        return "aux"
    if record.status is not CallStatus.OK:
        return str(record.status)
    if choice is None or choice.token_ids is None:
        return "no_ids"
    if not len(choice.token_ids):
        return "empty_reply"
    if has_prompt_ids is None:
        has_prompt_ids = record.prompt_ids is not None and len(record.prompt_ids) > 0
    return None if has_prompt_ids else "no_prompt_ids"


def untrained_reason(choice: SampledChoice, *, logprobs_valid: bool = False) -> str | None:
    """Why a reply's tokens are never trained though its ids are known; None where they are.

    ``logprobs_valid``: its log-probs were checked before.
    """
    if not choice.trainable:
        return reason_code(choice.untrainable_reason)
    if choice.logprobs is None:
        return "no_logprobs"
    return None if logprobs_valid or all_logprobs_valid([choice.logprobs]) else "logprob_unknown"


def all_logprobs_valid(arrays: Sequence[npt.NDArray[np.float32]]) -> bool:
    """Whether every value can be the log-probability of a sampled token."""
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return not len(values) or bool(LOWEST_LOGPROB < values.min() <= values.max() <= HIGHEST_LOGPROB)


def reason_code(text: str | None) -> str:
    """The leading identifier of a producer's reason, so that reasons can be counted by name."""
    found = re.match(r"[a-z0-9_]{1,64}", text or "")
    return found.group() if found else "untrainable"


def by_reason(items: Iterable[Excluded]) -> tuple[ExcludedUnits, ...]:
    """Units collected under their reasons, sorted; reasons without a token are left out."""
    collected: dict[str, list[TokenRange]] = {}
    for reason, units in items:
        collected.setdefault(reason, []).extend(units)
    return tuple(
        ExcludedUnits(reason=reason, units=tuple(sorted(collected[reason])))
        for reason in sorted(collected)
        if collected[reason]
    )
