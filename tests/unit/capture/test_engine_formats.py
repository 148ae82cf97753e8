"""What goes wrong in engines' answers: calls numbered in odd ways, lists that disagree, parsers that fail.

Rows of the field's bug log: B019 (modes of SGLang's streams), B020 (ids in one mode, log-probs in the other), B023 and
B024 (numbers of parallel calls), B046 (the best-ranked token), B047 (a list of ids with a gap).
"""

from itertools import pairwise
from typing import Any

import orjson
import pytest

from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.capabilities import Capability, request_token_ids
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, as_ids, parser_failures
from rollmill_capture.upstream.formats.upstream_format import (
    CHAT,
    COMPLETIONS,
    OPENAI_RESPONSES,
    SGLANG_GENERATE,
    VLLM_GENERATE,
    UpstreamFormat,
)


def chunk(delta: dict[str, Any], finish: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **choice}]}


def piece(index: int | None = 0, arguments: str | None = "", **fields: Any) -> dict[str, Any]:
    function = {"name": fields.pop("name", None), "arguments": arguments}
    return {"index": index, "id": fields.pop("id", None), "function": function, **fields}


def calls_of(*pieces: dict[str, Any]) -> list[tuple[str | None, str, str]]:
    """Calls of a stream with one piece in each chunk."""
    assembler = CHAT.assembler(1, None)
    for item in pieces:
        assembler.add(chunk({"tool_calls": [item]}))
    message = orjson.loads(assembler.parsed().choices[0].message or b"{}")
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


def test_parallel_calls_that_all_have_index_0_stay_apart() -> None:
    found = calls_of(
        piece(0, '{"q":"x"}', id="a", name="search"),
        piece(0, '{"q":"y"}', id="b", name="search"),
    )
    assert found == [("a", "search", '{"q":"x"}'), ("b", "search", '{"q":"y"}')]


def test_pieces_belong_to_the_call_of_their_index_not_to_the_newest() -> None:
    found = calls_of(
        piece(0, id="a", name="a"),
        piece(1, id="b", name="b"),
        piece(0, '{"k":'),
        piece(1, '{"m":1}'),
        piece(0, "1}"),
    )
    assert found == [("a", "a", '{"k":1}'), ("b", "b", '{"m":1}')]


def test_a_new_id_with_each_piece_opens_no_new_call() -> None:
    found = calls_of(
        piece(0, id="a", name="f"), piece(0, '{"x":', id="b"), piece(0, " 1}", id="c"), piece(0, None, id="d")
    )
    assert found == [("a", "f", '{"x": 1}')]


def test_an_id_or_a_name_repeated_with_each_piece_opens_no_new_call() -> None:
    assert calls_of(piece(0, "{", id="a", name="f"), piece(0, "}", id="a", name="f")) == [("a", "f", "{}")]


def test_calls_without_an_index_are_told_apart_by_their_place() -> None:
    assembler = CHAT.assembler(1, None)
    assembler.add(chunk({"tool_calls": [piece(None, "{}", id="a", name="f"), piece(None, "[]", id="b", name="g")]}))
    message = orjson.loads(assembler.parsed().choices[0].message or b"{}")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "[]"]


def generated(*chunks: dict[str, Any], prompt: list[int] | None = None) -> ParsedReply:
    assembler = SGLANG_GENERATE.assembler(1, as_ids(prompt))
    for item in chunks:
        assembler.add(item)
    return assembler.parsed()


def native(
    ids: list[int], pairs: list[int], total: int, *, end: bool = False, prompt_tokens: int = 3
) -> dict[str, Any]:
    finish = {"type": "stop", "matched": 9} if end else None
    meta = {
        "completion_tokens": total,
        "prompt_tokens": prompt_tokens,
        "output_token_logprobs": [[-token / 8, token, None] for token in pairs],
        "finish_reason": finish,
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


def found(reply: ParsedReply) -> tuple[list[int] | None, list[float] | None, str | None]:
    (choice,) = reply.choices
    ids = None if choice.token_ids is None else choice.token_ids.tolist()
    logprobs = None if choice.logprobs is None else choice.logprobs.tolist()
    return ids, logprobs, reply.untrainable_reason(choice)


def test_disjoint_ids_beside_cumulative_logprobs() -> None:
    reply = generated(native([16], [16], 1), native([13, 17], [16, 13, 17], 3, end=True), prompt=[1, 2, 3])
    assert found(reply) == ([16, 13, 17], [-2.0, -1.625, -2.125], None)


def test_cumulative_ids_beside_disjoint_logprobs() -> None:
    reply = generated(native([16], [16], 1), native([16, 13, 17], [13, 17], 3, end=True), prompt=[1, 2, 3])
    assert found(reply) == ([16, 13, 17], [-2.0, -1.625, -2.125], None)


@pytest.mark.parametrize("token", [None, 7])
def test_uneven_pieces_lose_and_double_no_token_in_either_mode(token: int | None) -> None:
    """120 tokens as 1+30+30+30+29; with ``token`` all alike, so that only the count tells the modes apart."""
    ids = [place if token is None else token for place in range(120)]
    cuts = [0, 1, 31, 61, 91, 120]
    disjoint = [native(ids[a:b], ids[a:b], b, end=b == 120) for a, b in pairwise(cuts)]
    cumulative = [native(ids[:b], ids[:b], b, end=b == 120) for b in cuts[1:]]
    for chunks in (disjoint, cumulative):
        assert found(generated(*chunks, prompt=[1, 2, 3])) == (ids, [-each / 8 for each in ids], None)


def test_a_stream_whose_count_fits_neither_reading_is_refused() -> None:
    ids, _, why = found(generated(native([16], [16], 1), native([13], [13], 5, end=True), prompt=[1, 2, 3]))
    assert (ids, why) == (None, "completion_ids_missing")


def test_without_a_count_repeated_beginnings_tell_the_modes_apart() -> None:
    def uncounted(ids: list[int], *, end: bool = False) -> dict[str, Any]:
        item = native(ids, ids, 0, end=end)
        del item["meta_info"]["completion_tokens"]
        return item

    cumulative = generated(uncounted([1]), uncounted([1, 2, 3], end=True), prompt=[1, 2, 3])
    disjoint = generated(uncounted([1]), uncounted([2, 3], end=True), prompt=[1, 2, 3])
    assert found(cumulative)[0] == found(disjoint)[0] == [1, 2, 3]


def test_a_logprob_of_another_token_than_the_one_at_its_place_is_unknown() -> None:
    reply = generated(native([5, 6], [5, 7], 2, end=True), prompt=[1, 2, 3])
    assert found(reply)[2] == "logprob_unknown_at:1"


def test_a_prompt_that_was_tokenised_again_is_seen_in_its_count() -> None:
    reply = generated(native([5], [5], 1, end=True, prompt_tokens=2), prompt=[15, 16, 17])
    assert found(reply)[2] == "prompt_ids(3)!=usage.prompt_tokens(2)"


def test_several_samples_are_a_list() -> None:
    body = [native([5], [5], 1, end=True), native([6], [6], 1, end=True)]
    reply = SGLANG_GENERATE.parse_body(body, as_ids([1, 2, 3]))
    assert [choice.token_ids.tolist() for choice in reply.choices if choice.token_ids is not None] == [[5], [6]]
    assert reply.usage == (3, 2)
    assert reply.complete


def test_a_prompt_of_text_has_no_ids() -> None:
    assert found(generated(native([5], [5], 1, end=True)))[2] == "prompt_ids_missing"


def test_the_best_ranked_token_is_not_the_sampled_one() -> None:
    entry = {"token": "b", "logprob": -1.75, "top_logprobs": [{"logprob": -0.25}, {"logprob": -1.75}]}
    choice = {"index": 0, "message": {}, "finish_reason": "stop", "token_ids": [77], "logprobs": {"content": [entry]}}
    reply = CHAT.parse_body({"choices": [choice], "prompt_token_ids": [1]}, None)
    assert found(reply)[:2] == ([77], [-1.75])


@pytest.mark.parametrize("ids", [[5, None, 7], [5, "6", 7], [5, -1, 7], [5, 2**31, 7], [True]])
def test_a_list_of_ids_with_a_gap_is_no_list_of_ids(ids: list[Any]) -> None:
    content = [{"logprob": -0.1}] * len(ids)
    choice = {"index": 0, "message": {}, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
    assert found(CHAT.parse_body({"choices": [choice], "prompt_token_ids": [1]}, None))[2] == "completion_ids_missing"


def test_llama_cpp_says_ids_of_the_reply_in_its_logprobs() -> None:
    content = [{"id": 7, "token": "a", "logprob": -0.5}, {"id": 8, "token": "b", "logprob": -0.25}]
    choice = {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop", "logprobs": {"content": content}}
    assert found(CHAT.parse_body({"choices": [choice]}, None)) == ([7, 8], [-0.5, -0.25], "prompt_ids_missing")


def test_older_sglang_says_ids_in_meta_info_alone() -> None:
    meta = {"output_token_logprobs": [[-0.5, 7, "a"]], "weight_version": "4"}
    choice = {
        "index": 0,
        "message": {},
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
        "meta_info": meta,
        "prompt_token_ids": [1, 2],
    }
    reply = CHAT.parse_body({"choices": [choice]}, None)
    assert found(reply) == ([7], [-0.5], None)
    assert reply.weight_versions == ("4",)


def test_a_batch_of_prompts_has_no_one_prompt() -> None:
    choices = [
        {"index": place, "text": "x", "finish_reason": "stop", "token_ids": [5], "prompt_token_ids": [place]}
        for place in (1, 2)
    ]
    reply = COMPLETIONS.parse_body({"choices": choices}, None)
    assert reply.prompt_ids is None
    assert {reply.untrainable_reason(choice) for choice in reply.choices} == {"several_prompts"}


def test_a_completions_stream_reads_like_its_whole_body() -> None:
    def part(text: str, ids: list[int], finish: str | None = None, **first: Any) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-token / 4 for token in ids], "tokens": ["?"] * len(ids)}
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, **first}
        return {"object": "text_completion", "model": "m", "choices": [choice]}

    assembler = COMPLETIONS.assembler(1, None)
    for item in (part("ab", [1, 2], prompt_token_ids=[9]), part("c", [3], "stop")):
        assembler.add(item)
    streamed = assembler.parsed()
    whole = COMPLETIONS.parse_body(part("abc", [1, 2, 3], "stop", prompt_token_ids=[9]), None)
    assert found(streamed) == found(whole) == ([1, 2, 3], [-0.25, -0.5, -0.75], None)
    assert orjson.loads(streamed.choices[0].message or b"") == orjson.loads(whole.choices[0].message or b"")


@pytest.mark.parametrize(
    ("message", "signs"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, ["tool_args_empty"]),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "content": "<tool_call>"}, []),
        ({"content": '<tool_call>{"name": "A", "arguments": {</tool_call>'}, ["tool_parse_error"]),
        ({"content": "<think>maybe <tool_call>{}</tool_call></think>no"}, []),
        ({"content": "plain"}, []),
        ({"content": None}, []),
        ([], []),
    ],
)
def test_signs_of_a_parser_that_failed(message: Any, signs: list[str]) -> None:
    assert parser_failures(orjson.dumps(message)) == signs


@pytest.mark.parametrize(
    ("kind", "upstream_format", "fields", "added"),
    [
        (EngineKind.AUTO, CHAT, {}, ["return_token_ids", "logprobs"]),
        (EngineKind.VLLM, CHAT, {"logprobs": True}, ["return_token_ids"]),
        (EngineKind.SGLANG, CHAT, {}, ["return_token_ids", "logprobs", "return_prompt_token_ids", "return_meta_info"]),
        (EngineKind.LLAMA_CPP, CHAT, {}, ["logprobs"]),
        (EngineKind.OPENAI, CHAT, {}, []),
        (EngineKind.VLLM, COMPLETIONS, {}, ["logprobs", "return_token_ids"]),
        (EngineKind.VLLM, COMPLETIONS, {"logprobs": 5}, ["return_token_ids"]),
        (EngineKind.OPENAI, COMPLETIONS, {}, []),
        (EngineKind.SGLANG, SGLANG_GENERATE, {}, ["return_logprob"]),
        (EngineKind.VLLM, VLLM_GENERATE, {}, ["sampling_params.logprobs"]),
        (EngineKind.VLLM, OPENAI_RESPONSES, {}, []),
    ],
)
def test_each_engine_is_asked_in_its_own_words(
    kind: EngineKind, upstream_format: UpstreamFormat, fields: dict[str, Any], added: list[str]
) -> None:
    assert request_token_ids(kind, upstream_format, fields)[1] == added


def test_a_client_that_forbids_what_is_needed_is_overruled_and_told_so_in_the_record() -> None:
    served, added, changed = request_token_ids(EngineKind.VLLM, CHAT, {"logprobs": False})
    assert (served["logprobs"], added, changed) == (True, ["return_token_ids"], True)


def test_who_streams_ids() -> None:
    assert Capability(EngineKind.VLLM).streams(CHAT, {})
    assert not Capability(EngineKind.SGLANG).streams(CHAT, {})
    assert not Capability(streams_ids=False).streams(CHAT, {})
    assert not Capability(EngineKind.LLAMA_CPP).streams(CHAT, {"tools": [{}]})
    assert Capability(EngineKind.SGLANG).streams(SGLANG_GENERATE, {})
