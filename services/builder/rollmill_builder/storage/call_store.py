"""The calls of an open session: each token and each byte of text once, however often requests repeat them.

`CallLog` is what a session holds, `CallStore` what its logs share, `CallContent` the stored bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from rollmill.errors import FatalError
from rollmill.models import CompletionRecord
from rollmill_builder.storage.call_parts import SEPARATOR, CallParts, Tails, parts_of, unpack_rest
from rollmill_builder.storage.sequence_store import Head, SequenceStore, SharedPrefix
from rollmill_builder.storage.spill import Extent, SpillFile
from rollmill_builder.storage.trie import TOKEN_BYTES

CALL_OVERHEAD = 1_200
"""Bytes that Python and the engine's bookkeeping add to a call; `make bench-builder-memory` measures them."""


class CallEntry(NamedTuple):
    """One call without its sequences."""

    completion_id: str
    digest: bytes
    rest: bytes | CompletionRecord
    """Packed; the record itself where it stays in memory for another owner."""
    tools: bytes | None


@dataclass(slots=True)
class CallContent:
    """The content of a session's calls, numbered in order of acceptance."""

    ids: SequenceStore = field(default_factory=lambda: SequenceStore(TOKEN_BYTES))
    """Prompts, each followed by its replies."""
    text: SequenceStore = field(default_factory=lambda: SequenceStore(1))
    """Messages of requests, each followed by the replies as messages."""
    entries: list[CallEntry] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    """Indices of ``entries`` by completion id."""

    def add(self, entry: CallEntry, prompt: Head, messages: Head, tails: Tails) -> None:
        self.ids.add(prompt, tails[0])
        self.text.add(messages, tails[1])
        self.numbers[entry.completion_id] = len(self.entries)
        self.entries.append(entry)

    def parts(self, number: int) -> CallParts:
        prompt, *replies = self.ids.read(number)
        messages, *texts = self.text.read(number)
        return CallParts(prompt, tuple(replies), messages, tuple(texts), self.entries[number].tools, None)

    def share(self, parts: CallParts) -> tuple[SharedPrefix | None, SharedPrefix | None]:
        """Prompt and messages of a further call, by what is stored already."""
        prompt = None if parts.prompt is None else self.ids.share(parts.prompt)
        messages = None if parts.messages is None else self.text.share(parts.messages)
        return prompt, messages

    def dump(self) -> bytes:
        entries = [(entry.completion_id, entry.digest, entry.rest, entry.tools) for entry in self.entries]
        packed: bytes = msgpack.packb([self.ids.dump(), self.text.dump(), entries])
        return packed

    @classmethod
    def load(cls, data: bytes) -> CallContent:
        ids, text, packed = msgpack.unpackb(data)
        entries = [CallEntry(*entry) for entry in packed]
        numbers = {entry.completion_id: number for number, entry in enumerate(entries)}
        return cls(SequenceStore.load(TOKEN_BYTES, ids), SequenceStore.load(1, text), entries, numbers)


class CallStore:
    """Content that grows, and that can be moved to a spill file until it is read again."""

    __slots__ = ("_content", "_extent", "length", "size")

    def __init__(self) -> None:
        self._content: CallContent | None = CallContent()
        self._extent: Extent | None = None
        self.length = 0
        self.size = 0
        """Bytes of content, in memory or in the file."""

    @property
    def content(self) -> CallContent:
        """Reads it back into memory where it was spilled. Raises FatalError where the file has lost it."""
        if self._content is None:
            assert self._extent is not None  # noqa: S101  # one of the two is always there
            self._content, self._extent = CallContent.load(_read(self._extent)), None
        return self._content

    @property
    def spilled(self) -> bool:
        return self._content is None

    def spill(self, file: SpillFile) -> bool:
        """Move the content to ``file``; False: there is no room in it."""
        if self._content is not None:
            self._extent = file.write(self._content.dump())
            if self._extent is not None:
                self._content = None
        return self.spilled

    def add(self, entry: CallEntry, prompt: SharedPrefix | None, messages: SharedPrefix | None, tails: Tails) -> None:
        if self.length and entry.tools == (last := self.content.entries[-1]).tools:
            entry = entry._replace(tools=last.tools)
        elif entry.tools is not None:
            self.size += len(entry.tools)
        self.content.add(entry, prompt, messages, tails)
        self.length += 1
        heads = sum(len(head.rest) for head in (prompt, messages) if head is not None)
        rest = len(entry.rest) if isinstance(entry.rest, bytes) else 0
        self.size += heads + rest + CALL_OVERHEAD + sum(len(tail) for some in tails for tail in some if tail)

    def copy_of_first(self, length: int) -> CallStore:
        """A store of the first ``length`` calls."""
        store = CallStore()
        for number in range(length):
            parts = self.content.parts(number)
            prompt, messages = store.content.share(parts)
            store.add(self.content.entries[number], prompt, messages, (parts.replies, parts.texts))
        return store


def _read(extent: Extent) -> bytes:
    """Raises FatalError: what the file has lost, a restart reads from the changelog."""
    try:
        return extent.read()
    except OSError as error:
        raise FatalError(f"the spill file cannot be read; a restart restores its sessions: {error}") from error


class CallLog:
    """The accepted calls, in order of acceptance: immutable by its interface, appended to in constant time.

    Logs share one store; each sees its own length of it. Appending to a log that is not the newest one copies.
    """

    __slots__ = ("_length", "_store")

    def __init__(self, store: CallStore | None = None) -> None:
        self._store = store or CallStore()
        self._length = self._store.length

    @classmethod
    def of(cls, records: Iterable[CompletionRecord]) -> CallLog:
        """A log of records that are in memory anyway; they are kept as they are."""
        store = CallStore()
        content = store.content
        for record in records:
            prompt, replies, messages, texts, tools, _ = parts_of(record)
            content.add(CallEntry(record.completion_id, b"", record, tools), prompt, messages, (replies, texts))
            store.length += 1
        return cls(store)

    def append(
        self, entry: CallEntry, prompt: SharedPrefix | None, messages: SharedPrefix | None, tails: Tails
    ) -> CallLog:
        store = self.own_store()
        store.add(entry, prompt, messages, tails)
        return CallLog(store)

    def own_store(self) -> CallStore:
        """The store with this log's calls and no others: those that it does not see were rolled back."""
        if self._store.length != self._length:
            self._store = self._store.copy_of_first(self._length)
        return self._store

    def digest_of(self, completion_id: str) -> bytes | None:
        content = self._store.content
        number = content.numbers.get(completion_id, self._length)
        return content.entries[number].digest if number < self._length else None

    @property
    def content(self) -> CallContent:
        return self._store.content

    @property
    def completion_ids(self) -> tuple[str, ...]:
        return tuple(entry.completion_id for entry in self._store.content.entries[: self._length])

    def __len__(self) -> int:
        return self._length

    def record(self, number: int, session_id: str, attempt: int) -> CompletionRecord:
        """A call without its prompt and its request."""
        content = self._store.content
        entry = content.entries[number]
        if isinstance(entry.rest, CompletionRecord):
            return entry.rest
        identity = {"session_id": session_id, "attempt": attempt, "completion_id": entry.completion_id}
        tails = content.ids.read(number)[1:], content.text.read(number)[1:]
        return unpack_rest(entry.rest, identity, tails)

    def full_record(self, number: int, session_id: str, attempt: int) -> CompletionRecord:
        """A call with its prompt and, of its request, messages and tools."""
        parts = self._store.content.parts(number)
        prompt = None if parts.prompt is None else np.frombuffer(parts.prompt, dtype="<i4")
        update: dict[str, Any] = {"prompt_ids": prompt, "request": _request(parts)}
        return self.record(number, session_id, attempt).model_copy(update=update)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallLog) and list(self._compared()) == list(other._compared())

    __hash__ = None  # type: ignore[assignment]  # it compares by content

    def _compared(self) -> Iterator[tuple[CallEntry, CallParts]]:
        content = self._store.content
        return ((content.entries[number], content.parts(number)) for number in range(self._length))


def _request(parts: CallParts) -> bytes | None:
    tools = [] if parts.tools is None else [b'"tools":' + parts.tools]
    messages = [] if parts.messages is None else [b'"messages":[%s]' % parts.messages.removesuffix(SEPARATOR)]
    return b"{%s}" % b",".join([*messages, *tools]) if messages or tools else None
