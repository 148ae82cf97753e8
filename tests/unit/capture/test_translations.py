"""Requests of other APIs as chat completions: nothing lost on the way, and what no engine understands refused."""

import tracemalloc
from typing import Any

import orjson
import pytest

from rollmill.errors import InvalidInputError
from rollmill_capture.apis import anthropic_request, gemini_request, openai_responses_request
from rollmill_capture.apis.chat_reply import PartialReply, as_chunks
from rollmill_capture.apis.history_cache import INVALID, HistoryCache, SessionHistory, as_object

PNG = "iVBORw0KGgo="


def memory() -> SessionHistory:
    return SessionHistory(HistoryCache(), "s")


def messages(**body: Any) -> dict[str, Any]:
    return anthropic_request.chat_fields({"max_tokens": 9, "messages": [], **body}, memory())[0]


def responses(**body: Any) -> dict[str, Any]:
    return openai_responses_request.chat_fields({"input": "hi", **body}, memory())[0]


def gemini(**body: Any) -> dict[str, Any]:
    return gemini_request.chat_fields({"contents": "hi", **body}, "m", memory())[0]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def thoughtful(text: str | None, thoughts: str, *calls: tuple[str, str, str]) -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    message = {"role": "assistant", "content": text, "reasoning": thoughts, "reasoning_content": thoughts}
    return {**message, "tool_calls": made} if made else message


def test_messages_system_blocks_become_one_and_a_billing_line_goes() -> None:
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cc=1; h=5f;"}, {"type": "text", "text": "Be"}]
    assert messages(system=[*blocks, {"type": "text", "text": "brief", "cache_control": {}}])["messages"] == [
        {"role": "system", "content": "Be\nbrief"}
    ]
    assert messages(system="Be")["messages"] == [{"role": "system", "content": "Be"}]


def test_messages_history_keeps_thoughts_calls_results_and_their_order() -> None:
    turns = [
        user("go"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": 1, "a": [2, 3]}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "and?"},
            ]
        ),
    ]
    assert messages(messages=turns)["messages"] == [
        user("go"),
        thoughtful("So", "hm", ("c1", "f", '{"b": 1, "a": [2, 3]}')),
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        user("and?"),
    ]


def test_messages_images_become_addresses() -> None:
    by_bytes = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    (turn,) = messages(messages=[user([{"type": "text", "text": "see"}, by_bytes, by_url])])["messages"]
    assert [part.get("image_url", part.get("text")) for part in turn["content"]] == [
        "see",
        {"url": f"data:image/png;base64,{PNG}"},
        {"url": "https://x/y.png"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_messages_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    fields = messages(tools=[tool], tool_choice={**choice, "disable_parallel_tool_use": True})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (expected, False)


def test_messages_sampling_and_the_engines_own_fields_pass() -> None:
    body = {"temperature": 0.5, "top_k": 3, "stop_sequences": ["END"], "thinking": {"type": "disabled"}, "min_p": 0.1}
    fields, ignored = anthropic_request.chat_fields({"messages": [], "metadata": {"user_id": "u"}, **body}, memory())
    assert fields == {
        "temperature": 0.5,
        "top_k": 3,
        "messages": [],
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": False},
        "min_p": 0.1,
    }
    assert ignored == ["metadata"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs at Anthropic"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [user([{"type": "document", "source": {"type": "base64"}}])]}, "document"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": "hi"}, "list of objects"),
    ],
)
def test_messages_that_no_engine_understands_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        messages(**body)


def test_responses_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "Rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": '{"a":  1}'},
        {"type": "function_call", "id": "fd", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
        {"role": "user", "content": "and?"},
    ]
    assert responses(input=items, instructions="Be brief")["messages"] == [
        {"role": "system", "content": "Be brief\nRules"},
        user("go"),
        thoughtful("So", "hm", ("c1", "f", '{"a":  1}'), ("c2", "g", "")),
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": "r2"},
        user("and?"),
    ]


def test_responses_options_have_their_counterparts() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    fields = responses(
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=7,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
        min_p=0.1,
        store=True,
    )
    assert fields["tools"][0]["function"] == {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (fields["max_tokens"], fields["reasoning_effort"], fields["min_p"]) == (7, "low", 0.1)
    assert fields["response_format"]["json_schema"] == {"name": "n", "schema": {}, "strict": True}
    assert "store" not in fields


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "not found"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [user([{"type": "input_file"}])]}, "input_file"),
        ({"input": None}, "input"),
    ],
)
def test_responses_that_no_engine_understands_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        responses(**body)


def test_gemini_contents_in_both_spellings() -> None:
    model: dict[str, Any] = {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "So"}]}
    model["parts"].append({"functionCall": {"name": "f", "args": {"a": 1}}})
    result = {"role": "user", "parts": [{"function_response": {"name": "f", "response": {"output": "r"}}}]}
    image = {"parts": [{"text": "see"}, {"inline_data": {"mime_type": "image/png", "data": "a-b_"}}]}
    fields = gemini(contents=[{"parts": [{"text": "go"}]}, model, result, image], system_instruction={"parts": []})
    assert fields["messages"] == [
        user("go"),
        thoughtful("So", "hm", ("call_0", "f", '{"a": 1}')),
        {"role": "tool", "tool_call_id": "call_0", "content": "r"},
        user(
            [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,a+b/"}},
            ]
        ),
    ]


def test_gemini_options_have_their_counterparts() -> None:
    declared = {
        "name": "f",
        "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True, "enum": ["STRING"]}}},
    }
    fields = gemini(
        generationConfig={
            "topP": 0.5,
            "maxOutputTokens": 3,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
        },
        tools=[{"functionDeclarations": [declared, {"name": "g"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        systemInstruction={"parts": [{"text": "Be brief"}]},
    )
    assert (fields["top_p"], fields["max_tokens"], fields["stop"]) == (0.5, 3, ["x"])
    assert fields["response_format"] == {"type": "json_object"}
    assert fields["messages"][0] == {"role": "system", "content": "Be brief"}
    (tool,) = fields["tools"]
    assert fields["tool_choice"] == "required"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"], "enum": ["STRING"]}},
    }


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "executableCode"),
        ({"contents": [{"role": "robot", "parts": []}]}, "'robot'"),
    ],
)
def test_gemini_requests_that_no_engine_understands_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        gemini(**body)


def test_arguments_come_back_as_they_were_sampled() -> None:
    kept = memory()
    sampled = '{"b":1,\n "a": "\\u00e9"}'
    kept.remember_call("c1", "f", sampled)
    same = {"a": "é", "b": 1}
    assert kept.sampled_arguments("c1", "f", same) == sampled
    assert kept.sampled_arguments(None, "f", same) == sampled
    assert kept.sampled_arguments("c1", "f", {"a": "other"}) == '{"a": "other"}'
    assert kept.sampled_arguments("c1", "g", {"a": "é"}) == '{"a": "é"}'
    assert SessionHistory(kept.cache, "another").sampled_arguments("c1", "f", same) == '{"a": "é", "b": 1}'


def test_arguments_that_are_no_object_survive_the_way_there_and_back() -> None:
    kept = memory()
    kept.remember_call("c1", "f", '{"a": ')
    assert as_object('{"a": ') == {INVALID: '{"a": '}
    assert kept.sampled_arguments("c1", "f", {INVALID: '{"a": '}) == '{"a": '
    assert memory().sampled_arguments("c1", "f", {INVALID: '{"a": '}) == '{"a": '


def test_the_oldest_memories_go_first() -> None:
    small = HistoryCache(max_bytes=1400)
    kept = SessionHistory(small, "s")
    kept.remember_response("r1", None, (user("x" * 100),))
    kept.remember_response("r2", "r1", (user("y"),))
    assert kept.messages_until("r2") == (user("x" * 100), user("y"))
    assert SessionHistory(small, "t").messages_until("r2") is None
    kept.remember_response("r3", "r2", (user("z" * 200),))
    assert kept.messages_until("r3") is None


def test_the_memory_takes_the_room_that_it_counts() -> None:
    kept = SessionHistory(HistoryCache(), "s")
    tracemalloc.start()
    try:
        for number in range(50):
            kept.remember_response(f"r{number}", None, (user("word " * 4000),))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.2 * kept.cache._used


def test_a_whole_answer_replayed_says_the_same() -> None:
    message = {
        "role": "assistant",
        "content": "So",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "matched_stop": 9}
    reply = PartialReply()
    for chunk in as_chunks({"id": "x", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}):
        reply.add(orjson.loads(orjson.dumps(chunk)))
    assert reply.message() == thoughtful("So", "hm", ("c", "f", '{"a":  1}'))
    assert (reply.finish_reason, reply.stop_reason, reply.prompt_tokens, reply.completion_tokens) == (
        "tool_calls",
        9,
        3,
        4,
    )
