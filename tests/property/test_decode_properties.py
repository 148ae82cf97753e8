"""Whatever bytes a topic holds, decoding gives a record or PoisonRecordError; and compact forms lose nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, Headers, decode, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, Manifest, Record, Trajectory
from rollmill.models.dead_letter import DeadLetterDecision, DeadLetterInfo
from rollmill.testing.samples.sessions import assistant, completion, user
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.topics import REGISTRY
from rollmill_builder.storage.call_parts import pack_rest, parts_of, unpack_rest

MODELS = {topic.name: topic.model for topic in REGISTRY if topic.model is not None}
KINDS = [*MODELS.values(), Manifest, DeadLetterInfo, DeadLetterDecision]
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
plain = scalars | st.binary(max_size=9)
names = st.sampled_from(
    [
        *("session_id", "attempt", "type", "choices", "token_ids", "logprobs", "message", "versions", "policy"),
        *("spec", "evaluators", "config", "metadata", "request", "output", "units", "traces", "version", "at"),
    ]
)
trees = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | plain.filter(bool), inner, max_size=4),
    max_leaves=12,
)
ANY_HEADERS: list[Headers] = [
    (),
    ((CONTENT_TYPE, JSON.encode()),),
    ((CONTENT_TYPE, MSGPACK.encode()),),
    ((CONTENT_TYPE, None),),
    ((CONTENT_TYPE, b"\xff"),),
]
SAMPLE = completion("c1", (1, 2), (5, 9), messages=[user("2 + 2?"), assistant("4")])


def refuses_or_reads(value: bytes) -> None:
    for kind in KINDS:
        for headers in ANY_HEADERS:
            try:
                found = decode(kind, value, headers)
            except PoisonRecordError:
                continue
            assert isinstance(found, Record)


@MANY
@given(st.binary(max_size=60))
@example(b"\x81\x90\x01")
@example(b"[" * 100_000)
@example(b"\x91" * 100_000 + b"\xc0")
@example(b'{"a":' * 5000)
@example(b"\xdd\xff\xff\xff\xff")
def test_f9_random_bytes_are_refused_or_read(value: bytes) -> None:
    refuses_or_reads(value)


@MANY
@given(st.dictionaries(names | plain.filter(bool), trees, max_size=8))
def test_f9_random_structures_are_refused_or_read(tree: dict[Any, Any]) -> None:
    refuses_or_reads(msgpack.packb(tree, use_bin_type=True))


def damaged(data: Any, rng: random.Random, pieces: list[Any]) -> Any:
    """A copy in which one place, at any depth, holds another value, key or nothing."""
    if isinstance(data, dict) and data and rng.random() < 0.8:
        key = rng.choice(list(data))
        rest = {name: value for name, value in data.items() if name != key}
        change = rng.randrange(4)
        if change == 0:
            return rest
        return {**rest, (7 if change == 1 else key): damaged(data[key], rng, pieces)}
    if isinstance(data, list) and data and rng.random() < 0.8:
        index = rng.randrange(len(data))
        return [*data[:index], damaged(data[index], rng, pieces), *data[index + 1 :]]
    return rng.choice(pieces)


@MANY
@given(st.integers(0, 2**32), st.lists(trees, min_size=1, max_size=4))
def test_f9_mutated_records_are_refused_or_read(seed: int, pieces: list[Any]) -> None:
    rng = random.Random(seed)  # noqa: S311  # repeatable
    data = msgpack.unpackb(encode(SAMPLE))
    for _ in range(rng.randrange(1, 4)):
        data = damaged(data, rng, [*pieces, {"message": b"\xff"}, [{b"\x00": b"\x01"}]])
    refuses_or_reads(msgpack.packb(data, use_bin_type=True))


@MANY
@given(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from([JSON, MSGPACK]))
def test_f9_flipped_bytes_are_refused_or_read(place: int, byte: int, form: str) -> None:
    value = bytearray(encode(SAMPLE, form))
    value[place % len(value)] = byte
    refuses_or_reads(bytes(value))


@pytest.mark.parametrize("field", ["request", "response", "original_request"])
def test_f9_bytes_inside_a_json_field_are_invalid(field: str) -> None:
    value = msgpack.packb({"type": "completion", "session_id": "s", "completion_id": "c", field: {"a": b"\x00"}})
    with pytest.raises(PoisonRecordError, match="JSON cannot represent") as refused:
        decode(MODELS["completions"], value)
    assert refused.value.reason == "invalid"


choices = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": st.lists(st.integers(0, 9), max_size=3),
        "message": st.sampled_from([{}, {"role": "assistant", "content": None}, {"content": "4"}]),
        "finish_reason": st.sampled_from([None, "stop"]),
        "stop_reason": st.none() | st.integers(0, 9) | st.text(max_size=3),
        "trainable": st.booleans(),
        "untrainable_reason": st.sampled_from([None, "no_ids"]),
    },
)
calls = st.fixed_dictionaries(
    {"choices": st.lists(choices, max_size=3)},
    optional={
        "prompt_ids": st.lists(st.integers(0, 9), max_size=3),
        "status": st.sampled_from(["ok", "error"]),
        "error": st.none() | st.text(max_size=4),
        "usage_completion_tokens": st.none() | st.integers(0, 9),
        "policy": st.just({"before": [0, 3], "after": [1, 2]}),
        "metadata": st.dictionaries(st.text(max_size=3), scalars, max_size=3),
        "started_at": st.floats(0, 10),
    },
)


@MANY
@given(calls)
@example({"choices": [{}]})
@example({"choices": [{}, {}]})
def test_f10_a_packed_call_is_the_call(data: dict[str, Any]) -> None:
    numbered = [{**choice, "index": index} for index, choice in enumerate(data["choices"])]
    record = CompletionRecord.model_validate({"session_id": "s", "completion_id": "c", **data, "choices": numbered})
    parts = parts_of(record)
    identity = {"session_id": "s", "attempt": 1, "completion_id": "c"}
    again = unpack_rest(pack_rest(record), identity, (parts.replies, parts.texts))
    assert comparable(again) == comparable(record.model_copy(update={"prompt_ids": None}))


def comparable(record: CompletionRecord) -> bytes:
    """Its MessagePack, since NaN equals nothing; nulls of a message may be left out."""
    data = record.model_dump(mode="python")
    for choice in data["choices"]:
        message = {} if choice["message"] is None else orjson.loads(choice["message"])
        choice["message"] = [(name, item) for name, item in sorted(message.items())]
    packed: bytes = msgpack.packb(data)
    return packed


@pytest.mark.parametrize("reward", [{}, [], "1.0", True, 10**400])
@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_a_reward_that_is_no_number_is_refused_when_it_is_read(form: str, reward: Any) -> None:
    plain: dict[str, Any] = orjson.loads(encode(sample_trajectory("s1", 1.0), JSON))
    plain["evaluation"]["outcome_reward"] = reward
    if reward == 10**400:
        value = json.dumps(plain).encode()
    else:
        value = msgpack.packb(plain) if form == MSGPACK else orjson.dumps(plain)
    with pytest.raises(PoisonRecordError):
        decode(Trajectory, value)
