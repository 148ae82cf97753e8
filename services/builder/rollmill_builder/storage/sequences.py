"""The sequences of a session's calls: token ids, or messages. Each call has a head, and tails that follow it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rollmill_builder.storage.buffer import Bytes
from rollmill_builder.storage.trie import ROOT, Trie, TriePosition

SEGMENT_BITS = 32
ABSENT = -1


class Shared(NamedTuple):
    """A sequence as the beginning of an earlier call's, and what comes after it."""

    call: int
    """Number of the earlier call, in order of acceptance."""
    tail: int
    """Which of its tails the beginning reaches into; -1: none, it lies in the head."""
    size: int
    """Bytes of the beginning; 0: nothing is shared."""
    rest: bytes


class SequenceStore:
    """Heads and tails of calls, numbered as they are added, in one trie."""

    __slots__ = ("_first", "_places", "trie")

    def __init__(self, unit: int) -> None:
        self.trie = Trie(unit)
        self._places, self._first = array("q"), array("I")

    def __len__(self) -> int:
        return len(self._first)

    def share(self, content: Bytes) -> Shared:
        """``content`` by what is held already; says nothing new to this object."""
        place = self.trie.find(content)
        if not place.end:
            return Shared(0, ABSENT, 0, bytes(content))
        return Shared(*self._holder(place), place.end, bytes(content[place.end :]))

    def add(self, head: Shared | Bytes | None, tails: Iterable[Bytes | None]) -> None:
        """The next call's sequences; None: it has none. Without a head, tails begin at the root."""
        start = None if head is None else self._placed(head)
        self._first.append(len(self._places))
        self._places.append(_code(start))
        for tail in tails:
            self._places.append(_code(None if tail is None else self.trie.insert(tail, start or ROOT)))

    def head(self, call: int) -> TriePosition | None:
        return _place(self._places[self._first[call]])

    def tails(self, call: int) -> tuple[TriePosition | None, ...]:
        return tuple(map(_place, self._codes(call)[1:]))

    @property
    def size(self) -> int:
        """Bytes held, without what Python adds."""
        return self.trie.size + 8 * len(self._places) + 4 * len(self._first)

    def dump(self) -> list[Any]:
        return [self.trie.dump(), self._places.tobytes(), self._first.tobytes()]

    @classmethod
    def load(cls, unit: int, data: Sequence[Any]) -> SequenceStore:
        lines = cls(unit)
        lines.trie = Trie.load(unit, data[0])
        lines._places.frombytes(data[1])
        lines._first.frombytes(data[2])
        return lines

    def _codes(self, call: int) -> array[int]:
        stop = self._first[call + 1] if call + 1 < len(self._first) else len(self._places)
        return self._places[self._first[call] : stop]

    def _holder(self, place: TriePosition) -> tuple[int, int]:
        """(call, tail) of the newest sequence that has ``place`` on its way: whatever was put there ended one."""
        for call in range(len(self._first) - 1, -1, -1):
            for slot, found in enumerate(map(_place, self._codes(call))):
                if found is not None and found.segment == place.segment and found.end >= place.end:
                    return call, slot - 1
        raise ValueError(f"no call reaches {place}")

    def _placed(self, head: Shared | Bytes) -> TriePosition:
        if not isinstance(head, Shared):
            return self.trie.insert(head)
        if not head.size:
            return self.trie.insert(head.rest)
        holder = _place(self._codes(head.call)[head.tail + 1])
        if holder is None or holder.end < head.size:
            raise ValueError(f"call {head.call} has no {head.size} bytes to share")
        return self.trie.insert(head.rest, self.trie.ancestor(holder, head.size))


def _code(place: TriePosition | None) -> int:
    return ABSENT if place is None else place.end << SEGMENT_BITS | place.segment


def _place(code: int) -> TriePosition | None:
    return None if code < 0 else TriePosition(code & (1 << SEGMENT_BITS) - 1, code >> SEGMENT_BITS)
