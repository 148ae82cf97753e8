"""Bytes made to crash, hang or fill the memory of who reads them: each is refused with a reason, at a bounded cost."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest
from aiokafka import ConsumerRecord

from rollmill.codec import CONTENT_TYPE, DEAD_LETTER, JSON, MANIFEST, MSGPACK, Headers, decode, encode, read_manifest
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import DeadLetterInfo, EvalResult, SessionOpened, Trace, Trajectory
from rollmill.ops.dlq.dead_letter import DeadLetterIndex
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.ops.ledger.in_flight import _unacknowledged
from rollmill.ops.ledger.reader import read_rewound
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.topics import COMPLETIONS
from rollmill.trainer.layouts.safetensors_reader import read_batch
from rollmill_capture.bodies import parse_object
from rollmill_capture.sse import MAX_EVENT, EventParser, EventTooLargeError

MIB = 2**20
AS_JSON: Headers = ((CONTENT_TYPE, JSON.encode()),)
AS_MSGPACK: Headers = ((CONTENT_TYPE, MSGPACK.encode()),)
SECONDS = 20.0
"""Far above what any of these takes, and far below what a hang would."""


def cheaply(work: Callable[[], Any], size: int) -> Any:
    """The result of ``work`` on ``size`` bytes, which may take a fixed multiple of them in memory at its peak."""
    most = 4 * MIB + 24 * size
    tracemalloc.start()
    began = time.monotonic()
    try:
        return work()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most, f"{peak / MIB:.0f} MiB"
        assert time.monotonic() - began < SECONDS


def refusal(value: bytes, headers: Headers) -> str:
    def read() -> str:
        with pytest.raises(PoisonRecordError) as refused:
            decode(COMPLETIONS.model, value, headers)
        return refused.value.reason

    return str(cheaply(read, len(value)))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"[" * MIB, "malformed"),
        (b'{"type":' * MIB, "malformed"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "invalid"),
        (b'{"type": "session_opened", "session_id": "s"', "malformed"),
        (b'{"type": "session_opened", "session_id": "\xff"}', "malformed"),
        (b'{"type": "session_opened", "session_id": "\\ud800"}', "malformed"),
        (b'{"type": "session_opened", "session_id": "s", "at": Infinity}', "malformed"),
        (b'{"type": "session_opened", "session_id": "s", "at": 1e999}', "malformed"),
        (b'{"type": "session_opened", "session_id": "s", "at": -1}', "invalid"),
        (b'{"type": "session_opened", "session_id": "s", "attempt": 99999999999999999999999999}', "invalid"),
        (b'{"type": "session_opened", "session_id": "' + b"s" * MIB + b'"}', "invalid"),
        (b'{"type": "session_opened", "session_id": "s\\u0000"}', "invalid"),
        (b'{"type": "session_opened", "session_id": "good", "session_id": "../bad"}', "invalid"),
    ],
)
def test_crafted_json_is_refused(value: bytes, reason: str) -> None:
    assert refusal(value, AS_JSON) == reason


def _declared(header: bytes, length: int, rest: bytes = b"") -> bytes:
    return header + struct.pack(">I", length) + rest


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (_declared(b"\xdd", 2**32 - 1), "malformed"),
        (_declared(b"\xdf", 2**32 - 1), "malformed"),
        (_declared(b"\xc6", 2**32 - 1), "malformed"),
        (_declared(b"\xdb", 2**32 - 1), "malformed"),
        (_declared(b"\xc9", 2**32 - 1, b"\x01"), "malformed"),
        (_declared(b"\xdd", 4 * MIB) * 500 + b"\x01" * (8 * MIB - 2500), "malformed"),
        (b"\x91" * MIB + b"\xc0", "malformed"),
        (b"\xa2\xff\xfe", "malformed"),
        (b"\xa3\xed\xa0\x80", "malformed"),
        (b"\xcb\x7f\xf0" + b"\x00" * 6, "invalid"),
        (msgpack.packb({b"type": "session_opened"}), "invalid"),
        (msgpack.packb({1: 2, "type": "session_opened", "session_id": "s"}), "invalid"),
        (msgpack.packb({"type": "session_opened", "session_id": "s", "at": float("nan")}), "invalid"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "invalid"),
        (b"\xd6\xff\x00\x00\x00\x00", "invalid"),
    ],
)
def test_crafted_messagepack_is_refused(value: bytes, reason: str) -> None:
    assert refusal(value, AS_MSGPACK) == reason


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "loss_mask", "response_logprobs"])
@pytest.mark.parametrize("bad", [[1e999], [float("nan")], [True], [None], [[1]], ["1"], "1", {"0": 1}])
def test_crafted_arrays_are_refused(name: str, bad: object) -> None:
    good = {"prompt_ids": [1], "response_ids": [2], "loss_mask": [1], "response_logprobs": [-0.5]}
    with pytest.raises(ValueError, match=name):
        Trace.model_validate({**good, name: bad})


@pytest.mark.parametrize("bad", [[2**70], [2**31], [-1], [1.5], b"\x01\x02\x03"])
def test_crafted_ids_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="response_ids"):
        Trace.model_validate({"prompt_ids": [1], "response_ids": bad, "loss_mask": [1]})


def test_a_crafted_manifest_is_none() -> None:
    for value in (b"[" * MIB, b"\xff", b'{"session_id": "s", "units": [[]]}', b'{"session_id": "../x"}', b""):
        assert cheaply(lambda value=value: read_manifest(((MANIFEST, value),)), len(value)) is None  # type: ignore[misc]  # a lambda with a default


def test_the_last_of_equal_keys_counts_for_everyone() -> None:
    assert decode(EvalResult, b'{"outcome_reward": 1, "outcome_reward": 0}', AS_JSON).outcome_reward == 0
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


# ---- safetensors -----------------------------------------------------------------------------------------------------


def batch() -> bytes:
    return step_values(0, [[[SampleTrace("s")]]])[0][0]


def altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = batch()
    size = int.from_bytes(value[:8], "little")
    layout = json.loads(value[8 : 8 + size])
    change(layout)
    text = json.dumps(layout).encode()
    return struct.pack("<Q", len(text)) + text + value[8 + size :]


def entry(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda layout: layout["input_ids"].update(fields)


CRAFTED = [
    b"",
    b"\x00" * 7,
    struct.pack("<Q", 2**63) + b"{}",
    struct.pack("<Q", 2**64 - 1),
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 2) + b"{}",
    struct.pack("<Q", MIB) + b"[" * MIB,
    batch()[:-1],
    batch()[:100],
    altered(entry(data_offsets=[0, 2**62])),
    altered(entry(data_offsets=[8, 0])),
    altered(entry(data_offsets=[-8, -1])),
    altered(entry(data_offsets=[0])),
    altered(entry(data_offsets="xx")),
    altered(entry(shape=[2**62, 4])),
    altered(entry(shape=[-1])),
    altered(entry(shape=[1] * 100)),
    altered(entry(dtype="F64")),
    altered(entry(dtype=7)),
    altered(entry(more=1)),
    altered(lambda layout: layout.update(input_ids=5)),
    altered(lambda layout: layout.pop("loss_mask")),
    altered(lambda layout: layout["cu_seqlens"].update(shape=[0], data_offsets=[0, 0])),
    altered(lambda layout: layout.update({"extras.x": {}})),
    altered(lambda layout: layout.update(__metadata__=[])),
    altered(lambda layout: layout.update(__metadata__={"header": 5})),
    altered(lambda layout: layout.update(__metadata__={"header": "[" * 10_000})),
]


@pytest.mark.parametrize("value", CRAFTED)
def test_a_crafted_micro_batch_is_refused(value: bytes) -> None:
    assert read_batch(batch()).header.micro_batches == 1
    with pytest.raises(PoisonRecordError) as refused:
        cheaply(lambda: read_batch(value), len(value))
    assert refused.value.reason in ("malformed", "invalid")


HEADLESS = [item for item in CRAFTED if len(item) < 100 or b"[" * 10_000 in item]


@pytest.mark.parametrize("value", HEADLESS)
def test_a_header_read_alone_is_as_careful(value: bytes) -> None:
    with pytest.raises(PoisonRecordError):
        cheaply(lambda: batch_header(value), len(value))
    with pytest.raises(PoisonRecordError):
        batch_header(altered(lambda layout: layout.update(__metadata__={"header": 5})))


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"[" * MIB, b'{"a":' * MIB, b'"\xff"', b'{"a": NaN}', b'{"a": "\\udfff"}', b"[]", b"1"]
)
def test_a_crafted_request_is_the_callers_mistake(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        cheaply(lambda: parse_object(body), len(body))


@pytest.mark.parametrize("line", [b"data:\n" * 10_000, b"data: x\r\n" * 10_000, b"x" * 20_000, b"data: " + b"x" * MIB])
def test_a_stream_that_never_ends_an_event_is_given_up(line: bytes) -> None:
    parser = EventParser()

    def feed() -> None:
        for _ in range(MAX_EVENT // 10_000):
            parser.feed(line)

    with pytest.raises(EventTooLargeError):
        cheaply(feed, MAX_EVENT)


def test_what_is_right_is_read() -> None:
    opened = SessionOpened(session_id="s")
    assert decode(COMPLETIONS.model, encode(opened), AS_MSGPACK) == opened
    assert decode(COMPLETIONS.model, encode(opened, JSON), AS_JSON) == opened
    assert Trajectory.model_fields


# ---- tools that read the whole log -----------------------------------------------------------------------------------


class BadLog:
    """A log in which every record is unreadable."""

    async def read(self, *_: object) -> AsyncIterator[ConsumerRecord[bytes, bytes]]:
        for value in (None, b"", b"\xff", b"{}", *HEADLESS):
            yield ConsumerRecord("t", 0, 0, 0, 0, b"k", value, None, 1, 1, ())


async def test_the_ledger_passes_over_what_nobody_can_read() -> None:
    log: Any = BadLog()
    assert await read_rewound(log) == {}
    assert [manifest async for manifest in _unacknowledged(log)] == []


@pytest.mark.parametrize("key", ["no hex", "abc", "ä"])
def test_a_dead_letter_with_a_crafted_key_is_a_letter_all_the_same(key: str) -> None:
    info = DeadLetterInfo(reason="r", error="e", stage="s", topic="built", partition=0, offset=0, key=key)
    letters = DeadLetterIndex()
    headers = ((DEAD_LETTER, encode(info, JSON)),)
    letters.take(ConsumerRecord("t", 0, 7, 0, 0, b"k", b"v", None, 1, 1, headers))
    (letter,) = letters.found.values()
    assert letter.info.reason == "unreadable"
