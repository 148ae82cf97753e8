"""The sampled tokens that a captured call holds, as ranges by policy version (rule L1)."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.models.completion import CompletionRecord, SampledChoice
from rollmill.models.token_accounting import TokenRange


def reply_units(
    record: CompletionRecord, choice: SampledChoice, start: int = 0, stop: int | None = None
) -> Iterator[TokenRange]:
    """Ranges of reply tokens ``start`` to ``stop`` (None: the end), split where the version changes."""
    position = 0
    for version, length in record.versions_of(choice):
        low, high = max(position, start), position + length if stop is None else min(position + length, stop)
        position += length
        if low < high:
            yield TokenRange(record.completion_id, choice.index, low, high, version or record.policy.before)


def captured_units(record: CompletionRecord) -> tuple[TokenRange, ...]:
    """All that a record holds: its replies' tokens, and the engine's own count where ids are missing (rule L1)."""
    units = [unit for choice in record.choices for unit in reply_units(record, choice)]
    return (*units, *counted_units(record))


def counted_units(record: CompletionRecord) -> Iterator[TokenRange]:
    """The tokens that the engine counted beyond those with ids in the record."""
    without = [choice.index for choice in record.choices if choice.token_ids is None]
    if record.usage_completion_tokens is None or (record.choices and not without):
        return
    known = sum(len(choice.token_ids) for choice in record.choices if choice.token_ids is not None)
    if record.usage_completion_tokens > known:
        index = min(without, default=0)
        yield TokenRange(record.completion_id, index, 0, record.usage_completion_tokens - known, record.policy.before)
