import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import openai
import orjson
import pytest
import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from relay.agents import make_client
from relay.engine import create_app
from relay.microbatch import Engine
from relay.model import RelayModel, from_bytes, to_bytes
from relay.sabotage import Sabotage
from relay.task import END_OF_TURN_ID, decode, encode

BASE = "http://engine/v1"
ASKED: list[Any] = [{"role": "user", "content": "?4"}]
IDS = {"return_token_ids": True}


def model(seed: int) -> RelayModel:
    torch.manual_seed(seed)
    return RelayModel()


@asynccontextmanager
async def raw_client(sabotage: Sabotage = Sabotage.NONE, version: int = 3) -> AsyncIterator[httpx.AsyncClient]:
    async with Engine(model(1), version=version) as engine:
        transport = httpx.ASGITransport(app=create_app(engine, sabotage))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client


@asynccontextmanager
async def stock_client() -> AsyncIterator[AsyncOpenAI]:
    async with Engine(model(1), version=3) as engine:
        transport = httpx2.ASGITransport(app=create_app(engine))
        async with make_client(DefaultAsyncHttpxClient(transport=transport)) as client:
            yield client.with_options(base_url=BASE)


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    request = {"model": "relay", "messages": ASKED, "logprobs": True, **IDS, **fields}
    answer = await client.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def ask_for_frames(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    request = {"model": "relay", "messages": ASKED, "stream": True, **fields}
    answer = await client.post("/v1/chat/completions", json=request)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.content.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    return [orjson.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]


async def seed_of_a_stop(client: httpx.AsyncClient) -> int:
    for seed in range(200):
        if (await ask(client, seed=seed))["choices"][0]["finish_reason"] == "stop":
            return seed
    raise AssertionError("no seed gives a reply that stops")


async def test_an_answer_has_ids_log_probs_usage_and_version_in_their_places() -> None:
    async with raw_client() as client:
        body = await ask(client, seed=await seed_of_a_stop(client))
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == encode("u?4.a")
    assert body["metadata"] == {"weight_version": "3"}
    assert choice["token_ids"][-1] == END_OF_TURN_ID
    assert choice["message"]["content"] == decode(choice["token_ids"][:-1])
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*choice["message"]["content"], ""]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": 5 + len(choice["token_ids"]),
    }


async def test_the_log_probs_are_those_of_the_version_that_is_named() -> None:
    async with raw_client() as client:
        body = await ask(client, n=8)
    for choice in body["choices"]:
        whole = torch.tensor([body["prompt_token_ids"] + choice["token_ids"]])
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert told == pytest.approx(model(1).log_probs(whole)[0, 5:].tolist(), abs=1e-4)


async def test_what_was_not_asked_for_is_not_told() -> None:
    async with raw_client() as client:
        body = await ask(client, logprobs=False, return_token_ids=False)
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None


async def test_a_stream_says_the_same_as_the_answer_in_one_piece() -> None:
    async with raw_client() as client:
        seed = await seed_of_a_stop(client)
        body = await ask(client, seed=seed)
        frames = await ask_for_frames(client, seed=seed, logprobs=True, stream_options={"include_usage": True}, **IDS)
    *chunks, usage = frames
    choices = [chunk["choices"][0] for chunk in chunks]
    whole = body["choices"][0]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["token_ids"]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
    assert [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]] == (
        whole["logprobs"]["content"]
    )
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"] == body["usage"]


async def test_only_the_first_chunk_tells_prompt_and_version() -> None:
    async with raw_client() as client:
        frames = await ask_for_frames(client, **IDS)
    assert frames[0]["prompt_token_ids"] == encode("u?4.a")
    assert frames[0]["metadata"] == {"weight_version": "3"}
    assert frames[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("prompt_token_ids" not in frame and "metadata" not in frame for frame in frames[1:])


async def test_the_stock_client_reads_an_answer() -> None:
    async with stock_client() as client:
        answer = await client.chat.completions.create(
            model="relay", messages=ASKED, n=2, seed=1, max_tokens=2, logprobs=True, extra_body=IDS
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        extra = choice.model_extra
        assert extra is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(extra["token_ids"]) <= 2


async def test_the_stock_client_reads_a_stream() -> None:
    async with stock_client() as client:
        whole = await client.chat.completions.create(model="relay", messages=ASKED, seed=5)
        stream = await client.chat.completions.create(model="relay", messages=ASKED, seed=5, stream=True)
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, "not in the vocabulary"),
        ({"messages": [{"role": "system", "content": "1"}]}, "knows the roles"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_request_that_cannot_be_served_is_told_why(fields: dict[str, Any], hint: str) -> None:
    async with raw_client() as client:
        answer = await client.post("/v1/chat/completions", json={"messages": ASKED, **fields})
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "BadRequestError"


async def test_the_stock_client_raises_on_a_refusal() -> None:
    async with stock_client() as client:
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await client.chat.completions.create(model="relay", messages=[{"role": "user", "content": "hello"}])


async def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "?"}, {"type": "text", "text": "4"}]
    async with raw_client() as client:
        body = await ask(client, messages=[{"role": "user", "content": parts}])
    assert body["prompt_token_ids"] == encode("u?4.a")


async def test_new_weights_sample_from_their_version_on() -> None:
    async with raw_client() as client:
        weights = to_bytes(model(2).state_dict())
        swapped = await client.post("/admin/weights", params={"version": 4}, content=weights)
        body = await ask(client)
    assert swapped.json() == {"version": 4}
    assert body["metadata"] == {"weight_version": "4"}
    whole = torch.tensor([body["prompt_token_ids"] + body["choices"][0]["token_ids"]])
    told = [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert told == pytest.approx(model(2).log_probs(whole)[0, 5:].tolist(), abs=1e-4)


async def test_bad_weights_are_refused_and_change_nothing() -> None:
    async with raw_client() as client:
        refused = await client.post("/admin/weights", params={"version": 4}, content=b"junk")
        unnamed = await client.post("/admin/weights", content=to_bytes(model(2).state_dict()))
        version = await client.get("/admin/version")
    assert (refused.status_code, unnamed.status_code) == (400, 400)
    assert version.json() == {"version": 3}


async def test_every_call_is_sampled_by_one_version_while_weights_change() -> None:
    models = {version: model(version) for version in range(4, 9)}
    async with raw_client() as client, asyncio.TaskGroup() as group:
        calls = [group.create_task(ask(client, n=4, max_tokens=12)) for _ in range(30)]
        for version, newer in models.items():
            weights = to_bytes(newer.state_dict())
            await client.post("/admin/weights", params={"version": version}, content=weights)
            calls += [group.create_task(ask(client, n=4, max_tokens=12)) for _ in range(5)]
        await asyncio.wait(calls)
    models[3] = model(1)
    named = {int(call.result()["metadata"]["weight_version"]) for call in calls}
    assert len(named) > 1
    for body in (call.result() for call in calls):
        for choice in body["choices"]:
            whole = torch.tensor([body["prompt_token_ids"] + choice["token_ids"]])
            expected = models[int(body["metadata"]["weight_version"])].log_probs(whole)[0, 5:].tolist()
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)


async def test_a_long_poll_ends_when_its_version_is_there() -> None:
    async with raw_client() as client:
        poll = asyncio.create_task(client.get("/admin/version", params={"at_least": 4, "timeout": 5}))
        early = await client.get("/admin/version", params={"at_least": 4, "timeout": 0})
        assert early.json() == {"version": 3}
        assert not poll.done()
        await client.post("/admin/weights", params={"version": 4}, content=to_bytes(model(2).state_dict()))
        assert (await poll).json() == {"version": 4}


async def test_models_and_health_answer() -> None:
    async with raw_client() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "relay"


async def test_an_error_while_sampling_reaches_its_caller_and_the_engine_lives_on() -> None:
    broken, sound = model(1), to_bytes(model(1).state_dict())
    broken.head = torch.nn.Linear(7, 7)
    async with Engine(broken) as engine:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(engine)), base_url="http://engine")
        with pytest.raises(RuntimeError):
            await ask(client)
        await engine.load(sound, 1)
        assert (await ask(client))["metadata"] == {"weight_version": "1"}
        assert from_bytes(sound).head.out_features == 22
        await client.aclose()


async def spoiled_and_sound(sabotage: Sabotage) -> tuple[dict[str, Any], dict[str, Any]]:
    async with raw_client(sabotage) as spoiled, raw_client() as sound:
        seed = await seed_of_a_stop(sound)
        while len((await ask(sound, seed=seed))["choices"][0]["token_ids"]) < 2:
            seed += 1
        return await ask(spoiled, seed=seed), await ask(sound, seed=seed)


async def test_shifted_log_probs_stand_one_position_late() -> None:
    spoiled, sound = await spoiled_and_sound(Sabotage.SHIFT_LOGPROBS)
    told, true = (
        [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]] for body in (spoiled, sound)
    )
    assert told == [true[-1], *true[:-1]]
    assert spoiled["choices"][0]["token_ids"] == sound["choices"][0]["token_ids"]


async def test_shifted_labels_name_the_version_before() -> None:
    spoiled, _ = await spoiled_and_sound(Sabotage.SHIFT_LABELS)
    assert spoiled["metadata"] == {"weight_version": "2"}


async def test_a_dropped_end_of_turn_is_missing_everywhere() -> None:
    async with raw_client(Sabotage.DROP_END_OF_TURN) as spoiled, raw_client() as sound:
        seed = await seed_of_a_stop(sound)
        false, true = await ask(spoiled, seed=seed), await ask(sound, seed=seed)
    assert false["choices"][0]["token_ids"] == true["choices"][0]["token_ids"][:-1]
    assert false["choices"][0]["logprobs"]["content"] == true["choices"][0]["logprobs"]["content"][:-1]
    assert false["usage"]["completion_tokens"] == true["usage"]["completion_tokens"] - 1
    assert false["choices"][0]["finish_reason"] == "stop"
