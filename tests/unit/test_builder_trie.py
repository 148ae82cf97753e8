"""The trie of calls: prefixes stored once, references that a restore can follow, logs that can be rolled back."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from rollmill.codec import decode, encode
from rollmill.models import CompletionRecord, PolicyVersion, dump_json
from rollmill.testing.samples.sessions import assistant, choice, completion, user
from rollmill_builder.merging.parent_search import TrieIndex
from rollmill_builder.sessions.session_state import CallUpdate, OpenSession, read_update
from rollmill_builder.storage.call_parts import call_digest, parts_of
from rollmill_builder.storage.call_store import CallContent, CallLog
from rollmill_builder.storage.sequence_store import SequenceStore, SharedPrefix
from rollmill_builder.storage.trie import ROOT, Trie, TriePosition


def packed(*ids: int) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def test_a_conversation_of_any_length_is_one_segment() -> None:
    trie = Trie(4)
    positions = [trie.insert(packed(*range(count))) for count in (2, 5, 9)]
    assert [position.segment for position in positions] == [0, 0, 0]
    assert trie.size == len(packed(*range(9)))
    assert [trie.read(position) for position in positions] == [packed(*range(count)) for count in (2, 5, 9)]
    assert trie.is_prefix(positions[0], positions[2])
    assert not trie.is_prefix(positions[2], positions[0])


def test_equal_contents_have_one_position_and_others_fork() -> None:
    trie = Trie(4)
    first, fork = trie.insert(packed(1, 2, 3, 4)), trie.insert(packed(1, 2, 9))
    assert trie.insert(packed(1, 2, 9)) == fork
    assert trie.insert(packed(1, 2)) == trie.ancestor(first, 8) == trie.ancestor(fork, 8) == TriePosition(0, 8)
    assert trie.read(fork, 4) == packed(2, 9)
    assert trie.read(fork, 8) == packed(9)
    assert list(trie.path(fork)) == [fork, TriePosition(0, 8)]
    assert trie.size == len(packed(1, 2, 3, 4, 9))


def test_no_token_is_split() -> None:
    trie = Trie(4)
    trie.insert(packed(1, 0x01020304))
    assert trie.insert(packed(1, 0x01020305)) == TriePosition(1, 8)
    assert trie.find(packed(1, 0x01020306)) == TriePosition(0, 4)


def test_what_differs_late_is_found_where_it_differs() -> None:
    trie = Trie(4)
    ids = [*range(5000)]
    trie.insert(packed(*ids))
    assert trie.find(packed(*ids[:4999], 7)).end == 4 * 4999
    assert trie.find(packed(*ids[:3], 7)).end == 12
    assert trie.find(packed(*ids, 7)).end == 4 * 5000


def test_a_dump_is_the_same_trie() -> None:
    trie = Trie(4)
    positions = [trie.insert(packed(*ids)) for ids in ((1, 2, 3), (1, 5), (1, 5, 6), (4,))]
    again = Trie.load(4, trie.dump())
    assert [again.insert(trie.read(position)) for position in positions] == positions
    assert again.size == trie.size


def test_indexed_positions_are_found_on_the_way_to_the_root() -> None:
    trie = Trie(4)
    deep, side = trie.insert(packed(1, 2, 3, 4)), trie.insert(packed(1, 2, 9, 9))
    low, high = trie.ancestor(deep, 4), trie.ancestor(side, 12)
    index = TrieIndex(trie, [(low, "low"), (high, "high"), (high, "too")])
    assert index.nearest(deep) == low
    assert index.nearest(side) == high
    assert index.nearest(high, above=True) == low
    assert index.nearest(low, above=True) is None
    assert index.nearest(ROOT) is None
    assert index.at(high) == ["high", "too"]


def test_a_sequence_is_shared_with_whichever_call_has_it() -> None:
    store = SequenceStore(4)
    store.add(packed(1, 2), [packed(5, 9), packed(6, 9)])
    assert store.share(packed(1, 2, 6, 9, 3)) == SharedPrefix(0, 1, 16, packed(3))
    assert store.share(packed(1, 2, 5, 7)) == SharedPrefix(0, 0, 12, packed(7))
    assert store.share(packed(1, 3)) == SharedPrefix(0, -1, 4, packed(3))
    assert store.share(packed(4)) == SharedPrefix(0, -1, 0, packed(4))
    store.add(SharedPrefix(0, 1, 16, packed(3)), [None])
    position = store.head(1)
    assert position is not None
    assert store.trie.read(position) == packed(1, 2, 6, 9, 3)
    assert store.tails(1) == (None,)


def test_a_reference_to_what_is_not_there_is_an_error() -> None:
    store = SequenceStore(4)
    store.add(packed(1), [None])
    with pytest.raises(ValueError, match="to share"):
        store.add(SharedPrefix(0, -1, 8, b""), [])


TOOLS = [{"type": "function", "function": {"name": "look"}}]


def turns(count: int, tokens: int = 50) -> list[CompletionRecord]:
    """A conversation with requests that repeat all earlier messages."""
    records, prompt, messages = [], [1], [user("?")]
    for turn in range(count):
        reply = [1000 * turn + item for item in range(tokens)]
        message = assistant(f"reply {turn} " + "x" * 200)
        records.append(
            completion(
                f"c{turn:03d}",
                prompt,
                [choice(reply, message=message), choice([7, turn], index=1, logprobs=None)],
                at=10.0 + turn,
                messages=messages,
                tools=TOOLS,
                fingerprint="f1",
            )
        )
        prompt = [*prompt, *reply, 2, 3]
        messages = [*messages, message, user("and? " + "y" * 100)]
    return records


def stored(records: list[CompletionRecord]) -> tuple[OpenSession, list[CallUpdate]]:
    session, updates = OpenSession("s1", 1), []
    for record in records:
        update = read_update(encode(session.call_update(record, parts_of(record), record.completion_id.encode())))
        assert isinstance(update, CallUpdate)
        updates.append(update)
        session = session.updated(update)
    return session, updates


def canonical(record: CompletionRecord) -> CompletionRecord:
    """With its JSON written the one way that equal things are written."""
    texts = {item.index: item.message and dump_json(orjson.loads(item.message)) for item in record.choices}
    choices = tuple(item.model_copy(update={"message": texts[item.index]}) for item in record.choices)
    request = record.request and dump_json(orjson.loads(record.request))
    return record.model_copy(update={"choices": choices, "request": request})


def test_stored_records_are_read_back_in_full() -> None:
    records = turns(4)
    old = PolicyVersion(1, 2)
    records.append(
        completion(
            "odd",
            None,
            choice([5, 6], versions=[[old, 1], [PolicyVersion(), 1]], stop_reason="x", trainable=False),
            metadata={"kept": None},
            usage_completion_tokens=2,
        )
    )
    session, _ = stored(records)
    assert session.records() == [canonical(record) for record in records]


def test_an_update_holds_what_is_new_and_no_more() -> None:
    _, updates = stored(turns(60))
    sizes = [len(encode(update)) for update in updates]
    assert max(sizes[2:]) < 1.05 * min(sizes[2:])
    assert updates[59].prompt == SharedPrefix(58, 0, 4 * (1 + 59 * 52 - 2), packed(2, 3))


def test_memory_is_linear_in_what_is_new() -> None:
    sessions = {count: stored(turns(count))[0] for count in (30, 60)}
    sizes = {count: session.calls.own_store().size for count, session in sessions.items()}
    assert sizes[60] < 2.05 * sizes[30]


@pytest.mark.parametrize("echoed", [{}, {"refusal": None}, {"name": "x"}])
def test_a_reply_that_is_repeated_with_other_fields_is_shared(echoed: dict[str, Any]) -> None:
    message = assistant("a" * 1000, tool_calls=None, reasoning_content=None)
    first = completion("c1", [1], choice([5], message=message), at=1.0, messages=[user("?")])
    second = completion("c2", [1, 5], [6], messages=[user("?"), assistant("a" * 1000, **echoed), user("and?")])
    session, (_, update) = stored([first, second])
    assert update.messages is not None
    assert len(update.messages.rest) < 100
    nulls = {name: value for name, value in echoed.items() if value is not None}
    repeated = orjson.loads(session.record(1).request or b"")["messages"]
    assert repeated == [user("?"), assistant("a" * 1000, **nulls), user("and?")]
    segments = len(session.calls.content.text.trie.branch_points())
    assert segments == (2 if nulls else 1)


def test_a_rolled_back_call_leaves_nothing_behind() -> None:
    records = turns(5)
    before, _ = stored(records[:3])
    other = completion("c003", [1, 2], [5], at=1.0)
    after = before.updated(before.call_update(other, parts_of(other), b"x"))
    assert len(after.calls) == 4
    assert before.calls.digest_of("c003") is None
    again = before.updated(before.call_update(records[3], parts_of(records[3]), b"y"))
    assert again.calls.digest_of("c003") == b"y"
    assert again.record(3).prompt_ids.tolist() == records[3].prompt_ids.tolist()  # type: ignore[union-attr]  # it has some
    assert after.record(3).prompt_ids.tolist() == [1, 2]  # type: ignore[union-attr]  # it has some
    assert (
        again.calls == stored(records[:3])[0].updated(before.call_update(records[3], parts_of(records[3]), b"y")).calls
    )


def test_logs_of_equal_calls_are_equal_however_they_came() -> None:
    session, _ = stored(turns(3))
    assert session.calls == stored(turns(3))[0].calls
    assert session.calls != stored(turns(2))[0].calls
    assert CallContent.load(session.calls.content.dump()).parts(2) == session.calls.content.parts(2)


def test_a_log_of_records_in_memory_keeps_them() -> None:
    records = turns(3)
    log = CallLog.of(records)
    assert [log.record(number, "s1", 1) for number in range(3)] == records
    assert all(log.record(number, "s1", 1) is records[number] for number in range(3))


def test_a_record_from_json_is_stored_alike() -> None:
    record = turns(1)[0]
    again: CompletionRecord = decode(CompletionRecord, encode(record, "application/json"))
    assert call_digest(again)[0] == call_digest(record)[0]
    session = OpenSession("s1", 1)
    assert session.call_update(record, parts_of(record), b"") == session.call_update(again, parts_of(again), b"")
