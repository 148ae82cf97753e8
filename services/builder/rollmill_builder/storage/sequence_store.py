"""The sequences of a session's calls: token ids, or messages. Each call has a head, and tails that follow it.

For token ids the head is the prompt, and each choice's reply is a tail. For messages the head is the request's
messages, and each reply as a message is a tail.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rollmill_builder.storage.trie import ROOT, Bytes, Trie, TriePosition

__all__ = ["Head", "SequenceStore", "SharedPrefix"]

SEGMENT_BITS = 32
ABSENT = -1


class SharedPrefix(NamedTuple):
    """A sequence as the beginning of an earlier call's sequence, and what comes after it."""

    call: int
    """Number of the earlier call, in order of acceptance."""
    tail: int
    """Which of its tails the beginning reaches into; -1: none, it ends in the head."""
    size: int
    """Bytes of the beginning; 0: nothing is shared."""
    rest: bytes


Head = SharedPrefix | Bytes | None
"""A prompt, or messages: by what is stored already, or in full; None: the call has none."""


class SequenceStore:
    """Heads and tails of calls, numbered as they are added, in one trie."""

    __slots__ = ("_first", "_positions", "trie")

    def __init__(self, unit: int) -> None:
        self.trie = Trie(unit)
        self._positions, self._first = array("q"), array("I")

    def __len__(self) -> int:
        return len(self._first)

    def share(self, content: Bytes) -> SharedPrefix:
        """``content`` by what is stored already. Stores nothing."""
        found = self.trie.find(content)
        if not found.end:
            return SharedPrefix(0, ABSENT, 0, bytes(content))
        return SharedPrefix(*self._holder(found), found.end, bytes(content[found.end :]))

    def add(self, head: Head, tails: Iterable[Bytes | None]) -> None:
        """The next call's sequences; None: it has none. Without a head, tails begin at the root."""
        start = None if head is None else self._insert(head)
        self._first.append(len(self._positions))
        self._positions.append(_pack(start))
        for tail in tails:
            self._positions.append(_pack(None if tail is None else self.trie.insert(tail, start or ROOT)))

    def head(self, call: int) -> TriePosition | None:
        return _unpack(self._positions[self._first[call]])

    def tails(self, call: int) -> tuple[TriePosition | None, ...]:
        return tuple(map(_unpack, self._packed(call)[1:]))

    def read(self, call: int) -> list[bytes | None]:
        """The head and the tails of a call, in full."""
        head = self.head(call)
        start = 0 if head is None else head.end
        tails = [None if end is None else self.trie.read(end, start) for end in self.tails(call)]
        return [None if head is None else self.trie.read(head), *tails]

    @property
    def size(self) -> int:
        """Bytes stored, without what Python adds."""
        return self.trie.size + 8 * len(self._positions) + 4 * len(self._first)

    def dump(self) -> list[Any]:
        return [self.trie.dump(), self._positions.tobytes(), self._first.tobytes()]

    @classmethod
    def load(cls, unit: int, data: Sequence[Any]) -> SequenceStore:
        store = cls(unit)
        store.trie = Trie.load(unit, data[0])
        store._positions.frombytes(data[1])
        store._first.frombytes(data[2])
        return store

    def _packed(self, call: int) -> array[int]:
        stop = self._first[call + 1] if call + 1 < len(self._first) else len(self._positions)
        return self._positions[self._first[call] : stop]

    def _holder(self, position: TriePosition) -> tuple[int, int]:
        """(call, tail) of the newest sequence that passes ``position``: each stored byte belongs to one."""
        for call in range(len(self._first) - 1, -1, -1):
            for slot, end in enumerate(map(_unpack, self._packed(call))):
                if end is not None and end.segment == position.segment and end.end >= position.end:
                    return call, slot - 1
        raise ValueError(f"no call reaches {position}")

    def _insert(self, head: SharedPrefix | Bytes) -> TriePosition:
        if not isinstance(head, SharedPrefix):
            return self.trie.insert(head)
        if not head.size:
            return self.trie.insert(head.rest)
        holder = _unpack(self._packed(head.call)[head.tail + 1])
        if holder is None or holder.end < head.size:
            raise ValueError(f"call {head.call} has no {head.size} bytes to share")
        return self.trie.insert(head.rest, self.trie.ancestor(holder, head.size))


def _pack(position: TriePosition | None) -> int:
    return ABSENT if position is None else position.end << SEGMENT_BITS | position.segment


def _unpack(packed: int) -> TriePosition | None:
    return None if packed < 0 else TriePosition(packed & (1 << SEGMENT_BITS) - 1, packed >> SEGMENT_BITS)
