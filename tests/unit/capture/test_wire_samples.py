"""Each sample of an engine's or gateway's answer is read as the table beside it says, whole or in any pieces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollmill_capture.engines import ReadChoice, Reading
from rollmill_capture.engines.chat import error_of, read_body
from rollmill_capture.relay import ChatRelay
from rollmill_capture.served import Wants

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
EXPECTED: dict[str, dict[str, Any]] = json.loads((WIRE / "expected.json").read_text())
NOTHING_WANTED = Wants(ids=False, logprobs=False, usage=False)


def read(name: str, piece: int = 1 << 20) -> Reading:
    raw = (WIRE / name).read_bytes()
    if name.endswith(".json"):
        return read_body(orjson.loads(raw))
    relay = ChatRelay(NOTHING_WANTED, choices=len(EXPECTED[name].get("choices", "1")))
    for start in range(0, len(raw), piece):
        relay.feed(raw[start : start + piece])
    return relay.reading()


def numbers(values: Any) -> list[float | None] | None:
    return None if values is None else [None if np.isnan(value) else round(float(value), 5) for value in values]


def ids(values: Any) -> list[int] | None:
    return None if values is None else values.tolist()


def message(choice: ReadChoice) -> dict[str, Any]:
    whole: dict[str, Any] = orjson.loads(choice.message or b"{}")
    return whole


def seen(reading: Reading, expected: dict[str, Any]) -> dict[str, Any]:
    """The reading, in the words of the table and no more of them than it uses."""
    first = reading.choices[0] if reading.choices else ReadChoice(0)
    whole = message(first)
    why = reading.untrainable(first)
    found = {
        "prompt_ids": ids(reading.prompt_ids),
        "completion_ids": ids(first.token_ids),
        "logprobs": numbers(first.logprobs),
        "choices": {
            str(choice.index): {"completion_ids": ids(choice.token_ids), "logprobs": numbers(choice.logprobs)}
            for choice in reading.choices
        },
        "text": whole.get("content") or "",
        "reasoning": whole.get("reasoning"),
        "tool_calls": [
            [call["function"]["name"], call["function"]["arguments"]] for call in whole.get("tool_calls") or []
        ],
        "finish_reason": first.finish_reason,
        "usage": list(reading.usage or ()),
        "complete": reading.complete,
        "is_error": reading.incomplete in {"error_frame", "not_sse"},
        "weight_version": reading.weight_versions[0] if reading.weight_versions else None,
        "trainable": "partial" if why == "partial:abort" else why is None,
        "why": why,
    }
    return {key: found[key] for key in expected if key != "meaning"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_is_read_as_expected(name: str) -> None:
    expected = {key: value for key, value in EXPECTED[name].items() if key != "meaning"}
    assert seen(read(name), expected) == expected


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".sse")])
def test_the_cuts_between_chunks_do_not_matter(name: str, piece: int) -> None:
    expected = {key: value for key, value in EXPECTED[name].items() if key != "meaning"}
    assert seen(read(name, piece), expected) == expected


def test_every_sample_has_its_line_in_the_table() -> None:
    refusals = {"vllm_error_400_context.json", "vllm_error_400_legacy_flat.json"}
    assert {path.name for path in WIRE.iterdir()} - {"expected.json"} == set(EXPECTED) | refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm_error_400_context.json", "maximum context length"),
        ("vllm_error_400_legacy_flat.json", "already running"),
    ],
)
def test_wrapped_and_flat_errors_tell_their_message(name: str, words: str) -> None:
    assert words in (error_of(orjson.loads((WIRE / name).read_bytes())) or "")


def test_a_stream_reads_like_the_whole_answer() -> None:
    stream, whole = read("vllm_chat_stream_tool_reasoning.sse"), read("vllm_chat_nonstream_tool_reasoning.json")
    assert ids(stream.prompt_ids) == ids(whole.prompt_ids)
    assert numbers(stream.choices[0].logprobs) == numbers(whole.choices[0].logprobs)
    assert message(stream.choices[0])["tool_calls"] == message(whole.choices[0])["tool_calls"]
    assert (stream.usage, stream.model) == (whole.usage, whole.model)
