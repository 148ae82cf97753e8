"""The calls of an open session: each token and each byte of text once, however often requests repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from rollmill.errors import FatalError
from rollmill.models import CompletionRecord
from rollmill_builder.storage.buffer import TOKEN_BYTES, Bytes
from rollmill_builder.storage.call_parts import SEPARATOR, Parts, Tails, parts_of, unpack_rest
from rollmill_builder.storage.changelog_records import CallDelta
from rollmill_builder.storage.sequences import SequenceStore, Shared
from rollmill_builder.storage.spill import Extent, SpillFile

CALL_OVERHEAD = 1_200
"""Bytes that Python and the engine's bookkeeping add to a call; `make bench-builder-memory` measures them."""


Head = Shared | Bytes | None
"""A prompt, or messages: by what is held already, or in full."""


class Entry(NamedTuple):
    """One call without its sequences."""

    completion_id: str
    digest: bytes
    rest: bytes | CompletionRecord
    """Packed; the record itself where it lives on elsewhere."""
    tools: bytes | None


@dataclass(slots=True)
class Content:
    """All that a session's calls hold."""

    ids: SequenceStore = field(default_factory=lambda: SequenceStore(TOKEN_BYTES))
    """Prompts, each followed by its replies."""
    text: SequenceStore = field(default_factory=lambda: SequenceStore(1))
    """Messages of requests, each followed by the replies as messages."""
    entries: list[Entry] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    """Places in ``entries`` by completion id."""

    def add(self, entry: Entry, prompt: Head, messages: Head, tails: Tails) -> None:
        self.ids.add(prompt, tails[0])
        self.text.add(messages, tails[1])
        self.numbers[entry.completion_id] = len(self.entries)
        self.entries.append(entry)

    def parts(self, number: int) -> Parts:
        prompt, *replies = _sequences(self.ids, number)
        messages, *texts = _sequences(self.text, number)
        return Parts(prompt, tuple(replies), messages, tuple(texts), self.entries[number].tools, None)

    def dump(self) -> bytes:
        entries = [(entry.completion_id, entry.digest, entry.rest, entry.tools) for entry in self.entries]
        packed: bytes = msgpack.packb([self.ids.dump(), self.text.dump(), entries])
        return packed

    @classmethod
    def load(cls, data: bytes) -> Content:
        ids, text, packed = msgpack.unpackb(data)
        entries = [Entry(*entry) for entry in packed]
        numbers = {entry.completion_id: number for number, entry in enumerate(entries)}
        return cls(SequenceStore.load(TOKEN_BYTES, ids), SequenceStore.load(1, text), entries, numbers)


def _sequences(lines: SequenceStore, number: int) -> list[bytes | None]:
    head, tails = lines.head(number), lines.tails(number)
    start = 0 if head is None else head.end
    found = [None if place is None else lines.trie.read(place, start) for place in tails]
    return [None if head is None else lines.trie.read(head), *found]


class CallStore:
    """Content that grows, and that can lie in a spill file while nobody looks at it."""

    __slots__ = ("_content", "_extent", "length", "size")

    def __init__(self) -> None:
        self._content: Content | None = Content()
        self._extent: Extent | None = None
        self.length = 0
        self.size = 0
        """Bytes of content, wherever they lie."""

    @property
    def content(self) -> Content:
        if self._content is None:
            assert self._extent is not None  # noqa: S101  # one of the two is always there
            self._content, self._extent = Content.load(_read(self._extent)), None
        return self._content

    @property
    def spilled(self) -> bool:
        return self._content is None

    def spill(self, file: SpillFile) -> bool:
        """Move the content to ``file``; False: there is no room in it."""
        if self._content is not None:
            self._extent = file.put(self._content.dump())
            if self._extent is not None:
                self._content = None
        return self.spilled

    def add(self, entry: Entry, prompt: Shared | None, messages: Shared | None, tails: Tails) -> None:
        if self.length and entry.tools == (last := self.content.entries[-1]).tools:
            entry = entry._replace(tools=last.tools)
        elif entry.tools is not None:
            self.size += len(entry.tools)
        self.content.add(entry, prompt, messages, tails)
        self.length += 1
        heads = sum(len(head.rest) for head in (prompt, messages) if head is not None)
        rest = len(entry.rest) if isinstance(entry.rest, bytes) else 0
        self.size += heads + rest + CALL_OVERHEAD + sum(len(tail) for some in tails for tail in some if tail)

    def copied(self, length: int) -> CallStore:
        """A store of the first ``length`` calls."""
        store = CallStore()
        for number in range(length):
            parts = self.content.parts(number)
            shared = _shared(store.content, parts)
            store.add(self.content.entries[number], *shared, (parts.replies, parts.texts))
        return store


def _read(extent: Extent) -> bytes:
    """Raises FatalError: what the file has lost, a restart reads from the changelog."""
    try:
        data = extent.read()
    except OSError as error:
        raise FatalError(f"the spill file cannot be read: {error}") from error
    if len(data) != extent.size:
        raise FatalError(f"the spill file holds {len(data)} bytes where {extent.size} were written")
    return data


def _shared(content: Content, parts: Parts) -> tuple[Shared | None, Shared | None]:
    prompt = None if parts.prompt is None else content.ids.share(parts.prompt)
    messages = None if parts.messages is None else content.text.share(parts.messages)
    return prompt, messages


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
            content.add(Entry(record.completion_id, b"", record, tools), prompt, messages, (replies, texts))
            store.length += 1
        return cls(store)

    def share(self, parts: Parts) -> tuple[Shared | None, Shared | None]:
        """Prompt and messages of a further call, by what is held already."""
        return _shared(self.newest().content, parts)

    def append(self, delta: CallDelta) -> CallLog:
        store = self.newest()
        entry = Entry(delta.completion_id, delta.digest, delta.rest, delta.tools)
        store.add(entry, delta.prompt, delta.messages, (delta.replies, delta.texts))
        return CallLog(store)

    def newest(self) -> CallStore:
        """The store, without calls that this log does not see: those were rolled back."""
        if self._store.length != self._length:
            self._store = self._store.copied(self._length)
        return self._store

    def digest_of(self, completion_id: str) -> bytes | None:
        content = self._store.content
        number = content.numbers.get(completion_id, self._length)
        return content.entries[number].digest if number < self._length else None

    @property
    def content(self) -> Content:
        return self._store.content

    def __len__(self) -> int:
        return self._length

    def record(self, number: int, session_id: str, attempt: int) -> CompletionRecord:
        """A call without its prompt and its request."""
        content = self._store.content
        entry = content.entries[number]
        if isinstance(entry.rest, CompletionRecord):
            return entry.rest
        identity = {"session_id": session_id, "attempt": attempt, "completion_id": entry.completion_id}
        tails = _sequences(content.ids, number)[1:], _sequences(content.text, number)[1:]
        return unpack_rest(entry.rest, identity, tails)

    def whole(self, number: int, session_id: str, attempt: int) -> CompletionRecord:
        """A call with its prompt and, of its request, messages and tools."""
        parts = self._store.content.parts(number)
        prompt = None if parts.prompt is None else np.frombuffer(parts.prompt, dtype="<i4")
        update: dict[str, Any] = {"prompt_ids": prompt, "request": _request(parts)}
        return self.record(number, session_id, attempt).model_copy(update=update)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallLog) and list(self._compared()) == list(other._compared())

    __hash__ = None  # type: ignore[assignment]  # it compares by content

    def _compared(self) -> Iterator[tuple[Entry, Parts]]:
        content = self._store.content
        return ((content.entries[number], content.parts(number)) for number in range(self._length))


def _request(parts: Parts) -> bytes | None:
    tools = [] if parts.tools is None else [b'"tools":' + parts.tools]
    messages = [] if parts.messages is None else [b'"messages":[%s]' % parts.messages.removesuffix(SEPARATOR)]
    return b"{%s}" % b",".join([*messages, *tools]) if messages or tools else None
