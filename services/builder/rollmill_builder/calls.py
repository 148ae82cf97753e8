"""The sampled replies of a session: one `Call` each, what keeps a reply out of traces, and its units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
    Unit,
    VersionRuns,
)
from rollmill_builder.call_log import TOKEN_BYTES, Content
from rollmill_builder.ended import EndedSession, Recorded
from rollmill_builder.messages import Message, parse_object
from rollmill_builder.parts import SEPARATOR, messages_of_text
from rollmill_builder.trie import Place

Ids = npt.NDArray[np.int32]

LOWEST_LOGPROB = -1000.0
"""Engines write -9999 for "unknown"; no sampled token is that unlikely."""
HIGHEST_LOGPROB = 1e-3
"""Above zero by more than rounding: not a log-probability."""


@dataclass(frozen=True, eq=False)
class Call:
    """One sampled reply with its prompt; ``order`` is its place by (start, completion id, choice)."""

    record: CompletionRecord
    """Prompt and request may be left out of it."""
    choice: SampledChoice
    order: int
    prompt: Place
    """Of the prompt in the trie of token ids; ``prompt.end`` counts its bytes."""
    end: Place
    """Of prompt and reply together."""
    untrained: str | None
    """Why the reply is context with mask 0; None where it is trained."""
    content: Content
    number: int

    @property
    def name(self) -> tuple[str, int]:
        return self.record.completion_id, self.choice.index

    @property
    def reply_ids(self) -> Ids:
        assert self.choice.token_ids is not None  # noqa: S101  # `calls_of` takes no reply without ids
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

    def units(self) -> tuple[Unit, ...]:
        return tuple(reply_units(self.record, self.choice))

    @property
    def text(self) -> Place | None:
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

    def may_follow(self, before: Call) -> bool:
        """Whether the messages begin with those of ``before``, or nobody knows."""
        if self.text is None or before.text is None:
            return True
        return self.content.text.trie.is_prefix(before.text, self.text)

    def messages_after(self, before: Call) -> tuple[Message, ...] | None:
        """The messages that come after those of ``before``; None where one of the two is unknown."""
        if self.text is None or before.text is None:
            return None
        trie = self.content.text.trie
        if trie.is_prefix(before.text, self.text):
            return messages_of_text(trie.read(self.text, before.text.end))
        return (self.messages or ())[len(before.messages or ()) :]


def calls_of(ended: EndedSession) -> tuple[Call, ...]:
    """The replies that traces are made of, in order."""
    found: list[Call] = []
    for item in ended.calls:
        tails = ended.content.ids.tails(item.number)
        ends = {choice.index: end for choice, end in zip(item.record.choices, tails, strict=True)}
        for choice in sorted(item.record.choices, key=lambda choice: choice.index):
            if refusal(item.record, choice, prompted=item.prompted) is None:
                found.append(_call(item, choice, ends[choice.index], len(found), ended.content))
    return tuple(found)


def _call(item: Recorded, choice: SampledChoice, end: Place | None, order: int, content: Content) -> Call:
    prompt = content.ids.head(item.number)
    if prompt is None or end is None:
        raise ValueError(f"{item.record.completion_id} has no ids")
    return Call(item.record, choice, order, prompt, end, untrained_reason(choice), content, item.number)


def refusal(record: CompletionRecord, choice: SampledChoice | None, *, prompted: bool | None = None) -> str | None:
    """Why a reply belongs into no trace; None where it does. ``choice`` None: the call gave no reply at all.

    ``prompted``: whether the ids of the prompt are known; None: the record itself says.
    """
    if record.kind is CallKind.AUX:
        return "aux"
    if record.status is not CallStatus.OK:
        return str(record.status)
    if choice is None or choice.token_ids is None:
        return "no_ids"
    if not len(choice.token_ids):
        return "empty_reply"
    if prompted is None:
        prompted = record.prompt_ids is not None and len(record.prompt_ids) > 0
    return None if prompted else "no_prompt_ids"


def untrained_reason(choice: SampledChoice) -> str | None:
    """Why a reply's tokens are never trained though its ids are known; None where they are."""
    if not choice.trainable:
        return reason_code(choice.untrainable_reason)
    if choice.logprobs is None:
        return "no_logprobs"
    if len(choice.logprobs) and not LOWEST_LOGPROB < choice.logprobs.min() <= choice.logprobs.max() <= HIGHEST_LOGPROB:
        return "logprob_unknown"
    return None


def reason_code(text: str | None) -> str:
    """The leading word of a producer's reason, so that reasons can be counted by name."""
    found = re.match(r"[a-z0-9_]{1,64}", text or "")
    return found.group() if found else "untrainable"


def reply_units(
    record: CompletionRecord, choice: SampledChoice, start: int = 0, stop: int | None = None
) -> Iterator[Unit]:
    """Units of reply tokens ``start`` to ``stop`` (None: the end), split where the version changes."""
    position = 0
    for version, length in record.versions_of(choice):
        low, high = max(position, start), position + length if stop is None else min(position + length, stop)
        position += length
        if low < high:
            yield Unit(record.completion_id, choice.index, low, high, version or record.policy.before)


def captured_units(record: CompletionRecord) -> tuple[Unit, ...]:
    """All that a record holds: its replies' tokens, and the engine's own count where ids are missing (RULES L1)."""
    units = [unit for choice in record.choices for unit in reply_units(record, choice)]
    return (*units, *_counted_units(record))


def _counted_units(record: CompletionRecord) -> Iterator[Unit]:
    without = [choice.index for choice in record.choices if choice.token_ids is None]
    if record.usage_completion_tokens is None or (record.choices and not without):
        return
    known = sum(len(choice.token_ids) for choice in record.choices if choice.token_ids is not None)
    if record.usage_completion_tokens > known:
        index = min(without, default=0)
        yield Unit(record.completion_id, index, 0, record.usage_completion_tokens - known, record.policy.before)


def refused_units(ended: EndedSession) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    """(reason, units) of everything that belongs into no trace."""
    for record, _, prompted in ended.calls:
        for choice in record.choices:
            reason = refusal(record, choice, prompted=prompted)
            if reason is not None and choice.token_ids is not None:
                yield reason, tuple(reply_units(record, choice))
        yield refusal(record, None) or "no_ids", tuple(_counted_units(record))


def refused_replies(ended: EndedSession) -> Iterator[str]:
    """The reason of every reply that belongs into no trace, those without a token among them."""
    for record, _, prompted in ended.calls:
        for choice in record.choices or (None,):
            reason = refusal(record, choice, prompted=prompted)
            if reason is not None:
                yield reason


def by_reason(items: Iterable[tuple[str, tuple[Unit, ...]]]) -> tuple[ExcludedUnits, ...]:
    """Units collected under their reasons, sorted; reasons without a token are left out."""
    collected: dict[str, list[Unit]] = {}
    for reason, units in items:
        collected.setdefault(reason, []).extend(units)
    return tuple(
        ExcludedUnits(reason=reason, units=tuple(sorted(collected[reason])))
        for reason in sorted(collected)
        if collected[reason]
    )
