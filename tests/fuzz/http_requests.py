"""Requests to capture's routes: one that is right for each, and mutations of it.

A route that has no valid body here gets an arbitrary one, so that a new route is covered from its first day.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.routing import Route

from tests.fuzz.capture_rig import POLICY, SESSION, FuzzRequest, bearer
from tests.fuzz.mutation import STRINGS, Mutator, dump_json

HI: Final = [{"role": "user", "content": "2+2?"}]
TOOL: Final = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALLED: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
VALUES: Final[Mapping[str, str]] = {"session_id": SESSION, "policy": POLICY, "model": "m-test"}

CHAT: Final[dict[str, Any]] = {
    "model": "m-test",
    "messages": [
        {"role": "system", "content": "be brief"},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        },
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "stream": False,
    "n": 1,
    "temperature": 0.7,
    "top_p": 1,
    "max_tokens": 16,
    "stop": ["\n"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
    "logit_bias": {"5": 1.0},
}
MESSAGES: Final[dict[str, Any]] = {
    "model": "m-test",
    "max_tokens": 16,
    "stream": False,
    "temperature": 1.0,
    "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "AA=="},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": False}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
RESPONSES: Final[dict[str, Any]] = {
    "model": "m-test",
    "instructions": "be brief",
    "stream": False,
    "max_output_tokens": 16,
    "temperature": 1,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ],
    "tools": [{"type": "function", **TOOL}],
    "store": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "include": [],
}
GEMINI: Final[dict[str, Any]] = {
    "contents": [
        {"role": "user", "parts": [{"text": "2+2?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"r": 4}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "generationConfig": {"maxOutputTokens": 16, "temperature": 1.0, "stopSequences": ["x"], "topK": 5},
    "tools": [{"functionDeclarations": [TOOL]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
}
TESTS: Final[dict[str, Any]] = {
    "source": "repository",
    "test_command": ["pytest"],
    "expected": {"fail_to_pass": ["t"], "pass_to_pass": []},
    "resources": {"memory_mib": 256},
}
SPEC: Final[dict[str, Any]] = {
    "session_id": "new",
    "attempt": 1,
    "task_id": "t",
    "group_id": "g",
    "group_size": 8,
    "policy": POLICY,
    "purpose": "train",
    "dataset": "d",
    "epoch": 0,
    "metadata": {"a": 1, "b": {"c": [1]}},
    "builder": {"strategy": "prefix_merging", "config": {}},
    "evaluators": [
        {"strategy": "external", "name": "human", "weight": 1.0, "config": {}},
        {"strategy": "composite", "name": "all", "config": {"parts": [{"strategy": "session_completed"}]}},
        {"strategy": "http", "name": "web", "config": {"url": "https://grader.example/grade"}},
        {"strategy": "test_on_output", "name": "tests", "config": TESTS},
    ],
    "deadline_seconds": 600.0,
    "idle_seconds": 120.0,
    "evaluation_seconds": 60.0,
}
CLOSE: Final[dict[str, Any]] = {
    "status": "COMPLETED",
    "reward": 1.0,
    "output": {"answer": 42},
    "error": None,
    "attempt": 1,
}
REWARD: Final[dict[str, Any]] = {
    "reward": 1.0,
    "evaluator": "human",
    "evaluation_id": "e1",
    "attempt": 1,
    "version": "1",
    "metadata": {"a": 1},
    "trace_rewards": [],
}

BODIES: Final[Mapping[str, dict[str, Any]]] = {
    "/chat/completions": CHAT,
    "/v1/completions": {"model": "m-test", "prompt": "2+2=", "max_tokens": 16, "n": 1, "stop": None, "logprobs": 1},
    "/messages": MESSAGES,
    "/count_tokens": MESSAGES,
    "/responses": RESPONSES,
    "/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "n": 1}, "stream": False},
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
    "generateContent": GEMINI,
    "streamGenerateContent": GEMINI,
    ":countTokens": {"generateContentRequest": {"model": "m-test", **GEMINI}},
    "/v1/sessions": SPEC,
    "/close": CLOSE,
    "/reward": REWARD,
    "/pause": {"mode": "wait", "seconds": 0.01},
    "/resume": {"version": [0, 3], "cache_reset": True},
}
HEADERS: Final[Mapping[str, tuple[str, ...]]] = {
    "x-session-id": (SESSION, "s2", "", "../x", "é", "a" * 300),
    "x-rollmill-call": ("aux", "agent", "other", ""),
    "x-rollmill-attempt": ("1", "-1", "99999999999999999999", "one", "²"),
    "idempotency-key": ("k1", "k2", "", "k" * 5_000),
    "x-request-id": ("r", "é" * 300),
    "x-stainless-retry-count": ("1", "-1", "many"),
    "anthropic-version": ("2023-06-01", ""),
    "content-type": ("application/json", "text/plain", "multipart/form-data; boundary=x", ""),
    "content-length": ("-1", "99999999999", "x"),
    "authorization": ("Bearer", "Bearer ", "Basic AAAA", "bearer é", "Bearer " + "x" * 5_000),
    "accept": ("text/event-stream", "*/*"),
}
QUERIES: Final = (
    b"",
    b"alt=sse",
    b"alt=json",
    b"key=rm-x",
    b"key",
    b"%ff=%00",
    b"a=" + b"b" * 4_000,
    b"&&==&",
    b"%ff",
)


def valid_request(route: Route, key: str | None) -> FuzzRequest:
    """A request to the route that has nothing wrong; routes without a body of their own here get an empty object."""
    method = "POST" if "POST" in (route.methods or ()) else "GET"
    path = PARAMETER.sub(lambda found: VALUES.get(found[1], "x"), route.path)
    headers = {**bearer(key), **({} if "/sessions" in path else {"x-session-id": SESSION})}
    return FuzzRequest(method, path, b"", headers, dump_json(_body(route)) if method == "POST" else b"")


def mutated_request(route: Route, keys: tuple[str | None, ...], mutator: Mutator) -> FuzzRequest:
    """A request to the route in which something is odd: method, path, query, headers, body, or several of them."""
    rng = mutator.rng
    path = PARAMETER.sub(lambda found: _path_piece(found[1], mutator), route.path)
    methods = sorted(route.methods or ())
    return FuzzRequest(
        rng.choice(methods if mutator.chance(0.95) else METHODS),
        path if mutator.chance(0.97) else path + rng.choice(("/", "//x", "/../..", "?a", "\x00", ":x")),
        b"" if mutator.chance(0.7) else rng.choice(QUERIES),
        _headers(rng.choice((*keys, keys[0], keys[0])), mutator),
        _mutated_body(_body(route), mutator),
    )


def _body(route: Route) -> dict[str, Any]:
    matches = [end for end in BODIES if route.path.endswith(end)]
    return BODIES[max(matches, key=len)] if matches else {}


def _path_piece(name: str, mutator: Mutator) -> str:
    usual = VALUES.get(name, "x")
    if mutator.chance(0.85):
        return usual
    return mutator.rng.choice((*STRINGS[:12], "new", "s2", f"{usual}\n", f"{usual}/x", "a:b", "." * 300, "%00", "٣"))


def _headers(key: str | None, mutator: Mutator) -> dict[str, str]:
    given = bearer(key) if mutator.chance(0.9) else {"x-api-key": key or ""}
    if mutator.chance(0.8):
        given["x-session-id"] = SESSION
    for name in mutator.rng.sample(sorted(HEADERS), mutator.rng.choice((0, 0, 1, 2))):
        given[name] = mutator.rng.choice(HEADERS[name])
    return given


def _mutated_body(body: dict[str, Any], mutator: Mutator) -> bytes:
    streamed = {**body, "stream": True} if mutator.chance(0.2) else body
    raw = dump_json(mutator.mutate(_shortened(streamed, mutator.rng)))
    return raw if mutator.chance(0.9) else mutator.damage(raw)


def _shortened(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Some of the fields: what the first of two bad fields would hide is then seen, too."""
    return {name: body[name] for name in body if rng.random() < 0.8}
