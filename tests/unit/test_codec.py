"""Bytes in, records or a named refusal out."""

from __future__ import annotations

import msgpack
import pytest

from rollmill.codec import CONTENT_TYPE, MAX_BYTES, Headers, decode, header, manifest_header, read_manifest
from rollmill.errors import PoisonRecordError
from rollmill.models import EvalResult, Manifest, PolicyVersion, TokenRange

JSON: Headers = ((CONTENT_TYPE, b"application/json; charset=utf-8"),)


@pytest.mark.parametrize(
    ("value", "headers", "reason"),
    [
        (None, (), "tombstone"),
        (b"x" * (MAX_BYTES + 1), (), "too_large"),
        (b"{}", ((CONTENT_TYPE, b"text/csv"),), "unknown_content_type"),
        (b"{", JSON, "malformed"),
        (b"\xff\xfe", JSON, "malformed"),
        (b"[" * 100_000, JSON, "malformed"),
        (b"\xc1", (), "malformed"),
        (msgpack.packb(7), (), "invalid"),
        (b'{"outcome_reward": NaN}', JSON, "malformed"),
        (b'{"outcome_reward": true}', JSON, "invalid"),
    ],
)
def test_bad_bytes_have_a_named_reason(value: bytes | None, headers: Headers, reason: str) -> None:
    with pytest.raises(PoisonRecordError) as refused:
        decode(EvalResult, value, headers)
    assert refused.value.reason == reason


def test_a_refusal_says_where_and_keeps_the_input_to_itself() -> None:
    with pytest.raises(PoisonRecordError, match=r"trace_rewards.1: .*number") as refused:
        decode(EvalResult, b'{"trace_rewards": [1, "sk-secret"]}', JSON)
    assert len(refused.value.detail) < 300


def test_without_a_content_type_an_object_is_json_and_the_rest_messagepack() -> None:
    assert decode(EvalResult, b'{"outcome_reward": 1}').outcome_reward == 1.0
    assert decode(EvalResult, msgpack.packb({"outcome_reward": 0.5})).outcome_reward == 0.5


def test_the_last_header_of_a_name_counts() -> None:
    assert header((("a", b"1"), ("b", b"2"), ("a", b"3")), "a") == b"3"
    assert header((), "a") is None


def test_a_manifest_is_read_without_the_value_and_never_raises() -> None:
    manifest = Manifest(session_id="s", units=(TokenRange("c", 0, 0, 7, PolicyVersion(1, 2)),))
    assert read_manifest((manifest_header(manifest),)) == manifest
    assert manifest.tokens == 7
    assert read_manifest((("manifest", b"broken"),)) is None
    assert read_manifest(()) is None
