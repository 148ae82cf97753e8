"""Buffers, tries and sequence stores read like plain bytes, whatever is stored in them and in whatever pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_builder.storage.sequence_store import SequenceStore
from rollmill_builder.storage.trie import Buffer, Trie

MANY = settings(max_examples=300, deadline=None)

tokens = st.lists(st.integers(0, 2), max_size=12).map(lambda ids: b"".join(bytes([0, 0, 0, item]) for item in ids))
pieces = st.lists(st.integers(0, 9000).map(lambda size: bytes(size % 251 for _ in range(size))), max_size=8)


@MANY
@given(pieces, st.data())
def test_a_buffer_reads_and_compares_like_bytes(parts: list[bytes], data: st.DataObject) -> None:
    buffer, whole = Buffer(b""), b"".join(parts)
    for part in parts:
        buffer.append(part)
    assert buffer.size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert buffer.read(start, stop) == whole[start:stop]
    other = bytearray(whole[start:] + b"more")
    if data.draw(st.booleans()):
        other = other[: data.draw(st.integers(0, len(other)))]
    at = data.draw(st.integers(0, len(other)))
    if at < len(other) and data.draw(st.booleans()):
        other[at] ^= 0xFF
    assert buffer.common_prefix(start, memoryview(other), 1) == common_prefix(whole[start:], bytes(other))


def common_prefix(left: bytes, right: bytes) -> int:
    count = min(len(left), len(right))
    return next((at for at in range(count) if left[at] != right[at]), count)


@MANY
@given(st.lists(tokens, max_size=12))
def test_a_trie_holds_what_was_put_into_it_and_finds_the_longest_prefix(sequences: list[bytes]) -> None:
    trie = Trie(4)
    positions = [trie.insert(sequence) for sequence in sequences]
    assert [trie.read(position) for position in positions] == sequences
    assert [trie.insert(sequence) for sequence in sequences] == positions
    for sequence, position in zip(sequences, positions, strict=True):
        for other, other_position in zip(sequences, positions, strict=True):
            assert trie.is_prefix(position, other_position) == other.startswith(sequence)
            assert (position == other_position) == (sequence == other)
    again = Trie.load(4, trie.dump())
    assert [again.insert(sequence) for sequence in sequences] == positions


@MANY
@given(st.lists(tokens, max_size=8), tokens)
def test_what_a_trie_finds_is_as_long_as_can_be(sequences: list[bytes], content: bytes) -> None:
    trie = Trie(4)
    for sequence in sequences:
        trie.insert(sequence)
    longest = max((common_prefix(sequence, content) // 4 * 4 for sequence in sequences), default=0)
    position = trie.find(content)
    assert (position.end, trie.read(position)) == (longest, content[:longest])


calls = st.lists(st.tuples(st.none() | tokens, st.lists(st.none() | tokens, max_size=3)), max_size=8)


@MANY
@given(calls)
def test_shared_sequences_are_read_back_as_they_were_given(given_calls: list[Any]) -> None:
    store, plain = SequenceStore(4), SequenceStore(4)
    for head, tails in given_calls:
        store.add(None if head is None else store.share(head), tails)
        plain.add(head, tails)
    for number, (head, tails) in enumerate(given_calls):
        position = store.head(number)
        assert (None if position is None else store.trie.read(position)) == head
        found = [None if end is None else store.trie.read(end, len(head or b"")) for end in store.tails(number)]
        assert found == tails
    assert store.dump() == plain.dump() == SequenceStore.load(4, store.dump()).dump()
