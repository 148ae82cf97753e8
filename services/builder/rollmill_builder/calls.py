"""The sampled replies of a session: one `Call` each, what keeps a reply out of traces, and its units."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    CompletionSession,
    ExcludedUnits,
    SampledChoice,
    Unit,
    VersionRuns,
)
from rollmill_builder.messages import Message, messages_of, parse_object, tools_of

TOKEN_BYTES = 4

LOWEST_LOGPROB = -1000.0
"""Engines write -9999 for "unknown"; no sampled token is that unlikely."""
HIGHEST_LOGPROB = 1e-3
"""Above zero by more than rounding: not a log-probability."""


@dataclass(frozen=True, eq=False)
class Call:
    """One sampled reply with its prompt; ``order`` is its place by (start, completion id, choice)."""

    record: CompletionRecord
    choice: SampledChoice
    order: int
    prompt_ids: npt.NDArray[np.int32]
    reply_ids: npt.NDArray[np.int32]
    prompt: bytes
    """``prompt_ids`` packed, so that a prefix is found by one comparison of bytes."""
    reply: bytes
    untrained: str | None
    """Why the reply is context with mask 0; None where it is trained."""

    @property
    def name(self) -> tuple[str, int]:
        return self.record.completion_id, self.choice.index

    @property
    def size(self) -> int:
        """Bytes of prompt and reply together."""
        return len(self.prompt) + len(self.reply)

    @property
    def versions(self) -> VersionRuns:
        return self.record.versions_of(self.choice)

    def units(self) -> tuple[Unit, ...]:
        return tuple(reply_units(self.record, self.choice))

    @cached_property
    def messages(self) -> tuple[Message, ...] | None:
        """Of the request; None where it holds none."""
        return messages_of(self.record.request)

    @cached_property
    def message(self) -> Message | None:
        """The reply as a message; None where the record holds none."""
        return parse_object(self.choice.message)

    @cached_property
    def tools(self) -> bytes | None:
        """Canonical JSON of the request's tools; None where there are none."""
        return tools_of(self.record.request)


def calls_of(session: CompletionSession) -> tuple[Call, ...]:
    """The replies that traces are made of, in order."""
    found: list[Call] = []
    for record in session.completions:
        packed = b"" if record.prompt_ids is None else record.prompt_ids.tobytes()
        for choice in sorted(record.choices, key=lambda item: item.index):
            if refusal(record, choice) is None:
                found.append(_call(record, choice, len(found), packed))
    return tuple(found)


def _call(record: CompletionRecord, choice: SampledChoice, order: int, prompt: bytes) -> Call:
    if record.prompt_ids is None or choice.token_ids is None:
        raise ValueError(f"{record.completion_id} has no ids")
    return Call(
        record,
        choice,
        order,
        record.prompt_ids,
        choice.token_ids,
        prompt,
        choice.token_ids.tobytes(),
        untrained_reason(choice),
    )


def refusal(record: CompletionRecord, choice: SampledChoice | None) -> str | None:
    """Why a reply belongs into no trace; None where it does. ``choice`` None: the call gave no reply at all."""
    if record.kind is CallKind.AUX:
        return "aux"
    if record.status is not CallStatus.OK:
        return str(record.status)
    if choice is None or choice.token_ids is None:
        return "no_ids"
    if not len(choice.token_ids):
        return "empty_reply"
    if record.prompt_ids is None or not len(record.prompt_ids):
        return "no_prompt_ids"
    return None


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


def refused_units(session: CompletionSession) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    """(reason, units) of everything that belongs into no trace."""
    for record in session.completions:
        for choice in record.choices:
            reason = refusal(record, choice)
            if reason is not None and choice.token_ids is not None:
                yield reason, tuple(reply_units(record, choice))
        yield refusal(record, None) or "no_ids", tuple(_counted_units(record))


def by_reason(
    items: Iterator[tuple[str, tuple[Unit, ...]]] | list[tuple[str, tuple[Unit, ...]]],
) -> tuple[ExcludedUnits, ...]:
    """Units collected under their reasons, sorted; reasons without a token are left out."""
    collected: dict[str, list[Unit]] = {}
    for reason, units in items:
        collected.setdefault(reason, []).extend(units)
    return tuple(
        ExcludedUnits(reason=reason, units=tuple(sorted(collected[reason])))
        for reason in sorted(collected)
        if collected[reason]
    )
