"""Records of calls: versions, sampling, and what goes first when one is too large."""

from dataclasses import replace

import numpy as np
import orjson
import pytest

from rollmill.codec import decode, encode
from rollmill.models import CallKind, CallStatus, CompletionEvent, CompletionRecord, PolicyVersion
from rollmill.topics import COMPLETIONS
from rollmill_capture.apis.history_cache import HistoryCache, SessionHistory
from rollmill_capture.apis.native import SglangGenerateApi
from rollmill_capture.apis.openai import ChatApi
from rollmill_capture.coordination.policies import read_stamp, version_span
from rollmill_capture.model_config import Route, VersionSource
from rollmill_capture.proxy.record_size import fitting_bytes, skeleton
from rollmill_capture.proxy.recorder import Call, CallResult, completion_record
from rollmill_capture.proxy.upstream_request import prepare
from rollmill_capture.upstream.client import Target
from rollmill_capture.upstream.formats.parsed_reply import ParsedChoice, ParsedReply, as_ids

TOKENS = 500


def call(**fields: object) -> Call:
    body = {"messages": [{"role": "user", "content": "x" * 3000}], "logprobs": False, **fields}
    return Call(
        session_id="s",
        attempt=1,
        completion_id="c",
        kind=CallKind.AGENT,
        target=Target(Route(), "http://engine/v1", None),
        request=prepare(orjson.dumps(body), ChatApi().parse_request(body, {}, SessionHistory(HistoryCache(), "s"))),
        started_at=1.0,
        announced=PolicyVersion(),
    )


def record() -> CompletionRecord:
    choice = ParsedChoice(
        index=0,
        token_ids=np.arange(TOKENS, dtype=np.int32),
        logprobs=np.full(TOKENS, -0.5, dtype=np.float32),
        message=b'{"content":"' + b"y" * 4000 + b'"}',
        finish_reason="stop",
    )
    reading = ParsedReply(choices=(choice,), prompt_ids=np.arange(9, dtype=np.int32), usage=(9, TOKENS))
    ending = CallResult(CallStatus.OK, reading, 200, response=b'{"x":"' + b"z" * 3000 + b'"}')
    return completion_record(call(), ending, ended_at=2.0, announced=PolicyVersion())


def fitted(limit: int) -> CompletionRecord | None:
    value = fitting_bytes(record(), limit)
    found: CompletionRecord | None = None if value is None else decode(CompletionEvent, value)
    return found


def test_a_record_that_fits_is_whole() -> None:
    assert fitted(1_000_000) == record()


@pytest.mark.parametrize(
    ("spared", "dropped"),
    [
        (3000, ["original_request"]),
        (9000, ["original_request", "request.messages", "response"]),
        (13000, ["original_request", "request.messages", "response", "choices.message"]),
    ],
)
def test_text_goes_in_order_and_ids_never(spared: int, dropped: list[str]) -> None:
    whole = record()
    found = fitted(len(encode(whole)) - spared)
    assert found is not None
    assert found.metadata["dropped_for_size"] == dropped
    assert found.original_request is None
    assert (found.response is None) == ("response" in dropped)
    assert b"messages" not in (found.request or b"") or "request.messages" not in dropped
    assert found.prompt_ids is not None
    (choice,), (before,) = found.choices, whole.choices
    assert choice.replace(message=None) == before.replace(message=None)
    assert (choice.message is None) == ("choices.message" in dropped)


def test_what_cannot_be_made_to_fit_leaves_a_count_of_its_tokens() -> None:
    assert fitted(100) is None
    left = skeleton(record())
    assert (left.status, left.error, left.choices) == (CallStatus.INCOMPLETE, "too_large", ())
    assert left.usage_completion_tokens == TOKENS


def test_sampling_is_what_the_request_says_and_nothing_is_guessed() -> None:
    said = call(temperature=0, top_p=0.9, top_k=20).request.sampling_params()
    assert (said.temperature, said.top_p, said.top_k) == (0.0, 0.9, 20)
    odd = call(temperature="hot", top_p=7, top_k=True).request.sampling_params()
    assert (odd.temperature, odd.top_p, odd.top_k) == (None, None, None)


@pytest.mark.parametrize(
    ("stamp", "version"),
    [
        ("7", (2, 7)),
        ("3:7", (3, 7)),
        ("007", (2, 7)),
        ("default", None),
        ("", None),
        ("-1", None),
        ("v7", None),
        ("2147483648", None),
        ("1700000000000", None),
    ],
)
def test_a_weight_version_is_a_number_or_an_epoch_and_a_number(stamp: str, version: tuple[int, int] | None) -> None:
    assert read_stamp(stamp, epoch=2) == (None if version is None else PolicyVersion(*version))


def test_weights_that_change_in_mid_reply_give_both_versions_and_announced_ones_do_not_count() -> None:
    old, new = PolicyVersion(0, 4), PolicyVersion(0, 5)
    span = version_span(Route(), ("4", "5"), PolicyVersion(0, 9), PolicyVersion(0, 9))
    assert (span.before, span.after) == (old, new)
    announced = version_span(Route(version_source=VersionSource.ANNOUNCED), ("9",), old, new)
    assert (announced.before, announced.after) == (old, new)


@pytest.mark.parametrize("value", [None, "1,2", [1, True], [1.0], [-1], [2**31], ["1"]])
def test_what_is_no_list_of_ids_is_not_taken_for_one(value: object) -> None:
    assert as_ids(value) is None


def test_more_logprobs_than_ids_say_nothing() -> None:
    choice = ParsedChoice(0, np.array([1], dtype=np.int32), np.array([-0.1, -0.2], dtype=np.float32))
    reading = ParsedReply(choices=(choice,), prompt_ids=np.array([1], dtype=np.int32))
    found = completion_record(call(), CallResult(CallStatus.OK, reading), ended_at=2.0, announced=PolicyVersion())
    assert found.choices[0].logprobs is None
    assert found.choices[0].untrainable_reason == "logprobs(2)!=ids(1)"


def native(**sampling: object) -> Call:
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    return replace(
        call(),
        request=prepare(
            orjson.dumps(body), SglangGenerateApi().parse_request(body, {}, SessionHistory(HistoryCache(), "s"))
        ),
    )


def test_the_room_that_is_kept_for_a_record_is_never_less_than_it_takes_nor_made_out_of_nothing() -> None:
    none, least = COMPLETIONS.max_bytes, call(max_tokens=1).request.record_bytes
    assert 64 * 1024 < least < 100_000
    assert call(max_tokens=1, n=4).request.record_bytes - least == pytest.approx(3 * 64, abs=100)
    assert 64 * 1024 < call(max_tokens=-(10**12)).request.record_bytes <= least + 100
    assert (
        call().request.record_bytes,
        call(max_tokens=10**9).request.record_bytes,
        native().request.record_bytes,
    ) == (none, none, none)
    assert native(max_new_tokens=100).request.record_bytes - native(
        max_new_tokens=1
    ).request.record_bytes == pytest.approx(99 * 64, abs=20)
    # A field of that name says nothing to an engine's chat.
    assert call(sampling_params={"max_tokens": 1}).request.record_bytes == none
    assert call(temperature=0.5, sampling_params={"temperature": 2.0}).request.sampling_params().temperature == 0.5
    assert native(temperature=0.25).request.sampling_params().temperature == 0.25
