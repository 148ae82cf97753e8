"""What a streaming client sees at once, what is held back, and what never reaches it."""

import orjson

from rollmill_capture.apis.openai import DONE, RequestedDetails, passthrough_formatter
from rollmill_capture.errors import OPENAI
from rollmill_capture.proxy.response_stream import StreamRelay
from rollmill_capture.upstream.formats.upstream_format import CHAT

NOTHING = RequestedDetails(ids=False, logprobs=False, usage=False)
ALL = RequestedDetails(ids=True, logprobs=True, usage=True)


def relay_for(wants: RequestedDetails, choices: int) -> StreamRelay:
    return StreamRelay(
        CHAT.assembler(choices, None), passthrough_formatter(CHAT, wants).stream_formatter(), OPENAI.keep_alive
    )


def chunk(index: int = 0, text: str = "", finish: str | None = None, ids: tuple[int, ...] = ()) -> bytes:
    logprobs = {"content": [{"token": text, "logprob": -0.5} for _ in ids]}
    choice = {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": finish}
    return frame({"model": "m", "choices": [{**choice, "token_ids": list(ids)}], "prompt_token_ids": [1, 2]})


def frame(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


USAGE = frame({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}})


def test_the_frame_with_the_finish_reason_and_all_that_follows_is_held() -> None:
    relay = relay_for(ALL, 1)
    first, last = chunk(text="a", ids=(5,)), chunk(finish="stop", ids=(6,))
    assert relay.feed(first) == first
    assert relay.feed(last) + relay.feed(USAGE) + relay.feed(DONE) == b""
    assert relay.over
    assert relay.held == last + USAGE + DONE


def test_with_two_choices_the_last_one_to_finish_ends_the_reply() -> None:
    relay = relay_for(ALL, 2)
    assert relay.feed(chunk(0, "a", "stop", (5,)))
    assert relay.feed(chunk(1, "b", None, (5,)))
    assert relay.feed(chunk(1, "", "stop", (6,))) == b""
    assert relay.reading().complete


def test_ids_and_logprobs_that_the_client_did_not_ask_for_are_kept_from_it() -> None:
    relay = relay_for(NOTHING, 1)
    seen = orjson.loads(relay.feed(chunk(text="a", ids=(5,))).removeprefix(b"data: "))
    assert seen == {
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
    }
    assert relay.reading().sampled_tokens == 1


def test_the_usage_chunk_reaches_only_those_who_asked() -> None:
    relay = relay_for(NOTHING, 1)
    relay.feed(chunk(finish="stop", ids=(6,)) + USAGE)
    assert b"usage" not in relay.held
    assert relay.reading().usage == (2, 2)


def test_what_stock_clients_trip_over_is_dropped_and_comments_keep_the_line_alive() -> None:
    relay = relay_for(ALL, 1)
    assert relay.feed(b"retry: 10\n\nid: 4\n\nevent: ping\ndata: \n\n: hello\n\n") == OPENAI.keep_alive


def test_nothing_is_forwarded_after_an_error_frame() -> None:
    relay = relay_for(ALL, 1)
    relay.feed(chunk(text="a", ids=(5,)))
    assert relay.feed(frame({"error": {"message": "boom"}}) + chunk(text="b", finish="stop", ids=(6,))) == b""
    assert (relay.reading().incomplete, relay.reading().error) == ("error_frame", "boom")


def test_a_frame_that_is_no_json_makes_the_reply_incomplete() -> None:
    relay = relay_for(ALL, 1)
    relay.feed(b"data: {oops\n\n" + chunk(finish="stop", ids=(6,)))
    assert relay.reading().incomplete == "bad_frame"


def test_an_error_after_the_finish_reason_spoils_the_reply_all_the_same() -> None:
    relay = relay_for(ALL, 1)
    relay.feed(chunk(finish="stop", ids=(6,)) + frame({"object": "error", "message": "late"}))
    assert not relay.reading().complete
