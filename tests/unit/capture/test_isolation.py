"""Whatever a tenant, its agents or a stranger ask of any route: another tenant's sessions go on as without them.

Bob's work is a fixed script. It runs once alone, and then with requests of others between its steps, generated over all
routes of the application: Bob's answers and Bob's records have to be the same, and nobody is answered with a 5xx.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from rollmill.models import SessionEntry
from rollmill.topics import COMPLETIONS, EVALUATIONS, SESSIONS
from rollmill_capture.coordination.tenants import prefix
from rollmill_capture.http.application import BASES
from rollmill_capture.http.keys import digest_of
from rollmill_capture.settings import CaptureSettings
from tests.unit.capture.test_identity import ADMIN, ALICE, BOB, KEYS, REPLY, WIRE, Rig

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GRADED = [{"strategy": "external", "name": "human"}]
NAMES = ("x", "y", "new", f"{prefix('bob')}x", f"{prefix('alice')}x", f"{prefix('bob')}g", "a/b")
GROUPS = ("g", f"{prefix('bob')}g", f"{prefix('alice')}g", None)
ATTEMPTS = st.sampled_from([1, 2, 3])
STREAM = (WIRE / "vllm_chat_stream_basic.sse").read_bytes()
ENGINE = {
    "/generate": "sglang_generate_nonstream.json",
    "/v1/completions": "vllm_completions_nonstream_token_ids.json",
    "/inference/v1/generate": "vllm_inference_generate_nonstream.json",
}

Body = st.SearchStrategy[dict[str, Any]]
GEMINI: Body = st.just({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]})
OPENINGS: Body = st.fixed_dictionaries(
    {"session_id": st.sampled_from(NAMES), "attempt": ATTEMPTS, "group_id": st.sampled_from(GROUPS)},
    optional={"group_size": st.just(2), "evaluators": st.just(GRADED), "metadata": st.just({"tenant": "bob"})},
)
CLOSINGS: Body = st.fixed_dictionaries(
    {}, optional={"reward": st.sampled_from([9.0, 1e39]), "output": st.just({"a": 1}), "attempt": ATTEMPTS}
)
REWARDS: Body = st.fixed_dictionaries(
    {"reward": st.sampled_from([-99.0, 1.0]), "evaluator": st.just("human")},
    optional={"attempt": ATTEMPTS, "evaluation_id": st.just("e1"), "supersedes": st.just("e1")},
)
PAUSES: Body = st.sampled_from([{"mode": "wait", "seconds": 0}, {}])

BODIES: dict[str, Body] = {
    "/v1/chat/completions": st.just({"model": "m", **HI}),
    "/v1/responses": st.just({"model": "m", "input": "hi"}),
    "/v1/messages": st.just({"model": "m", "max_tokens": 9, **HI}),
    "/v1/completions": st.just({"model": "m", "prompt": "hi"}),
    "/inference/v1/generate": st.just({"model": "m", "token_ids": [1, 2], "sampling_params": {}}),
    "/generate": st.just({"input_ids": [1, 2], "sampling_params": {}}),
    "/{version}/models/{model:path}:generateContent": GEMINI,
    "/{version}/models/{model:path}:streamGenerateContent": GEMINI,
    "/{version}/models/{model:path}:countTokens": GEMINI,
    "/v1/messages/count_tokens": st.just({"model": "m", **HI}),
    "/{version}/models": st.just({}),
    "/{version}/models/{model:path}": st.just({}),
    "/v1/sessions": OPENINGS,
    "/v1/sessions/{session_id}": st.just({}),
    "/v1/sessions/{session_id}/close": CLOSINGS,
    "/v1/sessions/{session_id}/reward": REWARDS,
    "/admin/policies/{policy}/pause": PAUSES,
    "/admin/policies/{policy}/resume": st.just({}),
    "/admin/policies/{policy}/status": st.just({}),
    "/openapi.json": st.just({}),
    "/docs": st.just({}),
}
"""What every route may be sent, by its path behind the session's base; a route that is not here fails the tests."""


def kind_of(path: str) -> str | None:
    """The route in `BODIES`: the path behind the session's base, for all versions of Gemini."""
    for base in BASES:
        parts = path.removeprefix(base).split("/")
        if parts[2:3] and parts[2].startswith("models"):
            parts[1] = "{version}"
        kind = "/".join(parts)
        if path.startswith(f"{base}/") and kind in BODIES:
            return kind
    return None


class World(Rig):
    """Two tenants and an administrator, with an engine that has all of the upstream's routes."""

    def __init__(self, unprefixed: str | None) -> None:
        super().__init__(
            CaptureSettings(
                host="0.0.0.0", api_keys=KEYS, admin_key_sha256=digest_of(ADMIN), unprefixed_tenant=unprefixed
            )
        )
        self.tokens: dict[str, str] = {}

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if b'"stream":true' in request.content.replace(b" ", b""):
            return httpx.Response(200, content=STREAM, headers={"content-type": "text/event-stream"})
        name = ENGINE.get(path)
        return httpx.Response(200, json=REPLY if name is None else orjson.loads((WIRE / name).read_bytes()))

    async def ask(self, method: str, path: str, body: object, headers: dict[str, str]) -> tuple[int, Any]:
        async with self.request(method, path, body, **headers) as call:
            raw = await call.rest()
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = raw
        return call.status, answer


@dataclass(frozen=True)
class Action:
    """One request of somebody who is not Bob."""

    method: str
    path: str
    body: dict[str, Any]
    key: str
    """The name of a key of `Others`."""
    headers: tuple[tuple[str, str], ...]


ROUTES = [route for route in World(None).app.routes if isinstance(route, Route)]
OF_SESSIONS = [route for route in ROUTES if route.path.startswith("/v1/sessions")]
OPENING = Action("POST", "/v1/sessions", {"session_id": "x", "group_id": "g"}, "alice", ())
KEY_HEADERS = ("authorization", "x_api_key", "x_goog_api_key")


@st.composite
def actions(draw: st.DrawFn) -> Action:
    route = draw(st.sampled_from(OF_SESSIONS) | st.sampled_from(ROUTES))
    path = route.path.replace("{session_id}", draw(st.sampled_from(NAMES))).replace("{model:path}", "m")
    keys = ["alice", "alice", "token", "token", "none", "unknown", "bob's digest", "alice and token"]
    if not path.startswith("/admin"):
        keys.append("admin")
    given_headers = draw(
        st.dictionaries(st.sampled_from(["x_session_id", "idempotency_key"]), st.sampled_from((*NAMES, "k1")))
    )
    method = min(route.methods or {"GET"})
    body = draw(BODIES[kind_of(route.path) or ""])
    return Action(
        method, path.replace("{policy}", "policy"), body, draw(st.sampled_from(keys)), tuple(given_headers.items())
    )


def keys_of(world: World, name: str) -> dict[str, str]:
    token = world.tokens.get("alice", "rm-none")
    keys: dict[str, list[str]] = {
        "alice": [ALICE],
        "token": [token],
        "none": [],
        "unknown": ["rm-guess"],
        "bob's digest": [KEYS["bob"]],
        "alice and token": [ALICE, token],
        "admin": [ADMIN],
    }
    bare = dict(zip(KEY_HEADERS, keys[name], strict=False))
    return {header: f"Bearer {key}" if header == "authorization" else key for header, key in bare.items()}


async def act(world: World, action: Action) -> None:
    """One request of others. Alice's newest token is kept: her agents have it."""
    headers = {**keys_of(world, action.key), **dict(action.headers)}
    status, answer = await world.ask(action.method, action.path, action.body, headers)
    assert 200 <= status < 500, (action, status, answer)
    if action.path == "/v1/sessions" and status in (200, 201):
        world.tokens["alice"] = answer["api_key"]
    if action.path.startswith("/admin"):
        assert status == 403


Step = tuple[str, str, dict[str, Any], str]
"""Method, path, body, and by which of Bob's keys."""
CALL: Step = ("POST", "/sessions/x/v1/chat/completions", {"model": "m", **HI}, "token")
SCRIPT: tuple[Step, ...] = (
    ("POST", "/v1/sessions", {"session_id": "x", "group_id": "g", "group_size": 2, "evaluators": GRADED}, "bob"),
    CALL,
    ("POST", "/v1/sessions", {"session_id": "y", "group_id": "g", "group_size": 2}, "bob"),
    CALL,
    ("GET", "/v1/sessions/x", {}, "bob"),
    ("POST", "/v1/sessions/x/reward", {"reward": 1.0, "evaluator": "human", "evaluation_id": "e1"}, "bob"),
    ("POST", "/v1/sessions/x/close", {"reward": 0.5, "output": {"a": 2}}, "bob"),
    ("POST", "/v1/sessions/x/reward", {"reward": 0.5, "evaluator": "human", "evaluation_id": "e2"}, "bob"),
    ("POST", "/v1/sessions", {"session_id": "x", "attempt": 2, "group_id": "g", "group_size": 2}, "bob"),
    CALL,
    ("POST", "/v1/sessions/y/close", {}, "bob"),
    ("GET", "/v1/sessions/x", {}, "bob"),
    ("GET", "/v1/sessions/y", {}, "bob"),
    ("GET", "/v1/models", {}, "token"),
    ("GET", "/admin/policies/policy/status", {}, "admin"),
)


async def run(unprefixed: str | None, between: Sequence[Sequence[Action]]) -> tuple[World, list[Any]]:
    """Bob's script, with the actions of others before each of its steps."""
    world, heard = World(unprefixed), list[Any]()
    for number, (method, path, body, by) in enumerate(SCRIPT):
        for action in between[number] if number < len(between) else ():
            await act(world, action)
        keys = {"bob": BOB, "token": world.tokens.get("bob", ""), "admin": ADMIN}
        headers = {"authorization": f"Bearer {keys[by]}"}
        if by == "token":
            headers["idempotency_key"] = "k1"
        status, answer = await world.ask(method, path, body, headers)
        if path == "/v1/sessions" and body["session_id"] == "x":
            world.tokens["bob"] = answer.get("api_key", "")
        heard.append((status, without(answer, "api_key", "environment")))
    return world, heard


def without(value: Any, *names: str) -> Any:
    """The value without what is chosen at random."""
    return {name: found for name, found in value.items() if name not in names} if isinstance(value, dict) else value


def records(world: World, is_bobs: Callable[[str], bool]) -> list[Any]:
    found = [item for item in world.event_writer.appended if is_bobs(item.key)]
    return [(item.topic.name, without(orjson_of(item.record), "completion_id", "token")) for item in found]


def orjson_of(record: Any) -> Any:
    return record.model_dump(mode="json")


@lru_cache
def alone(unprefixed: str | None) -> tuple[list[Any], list[Any], frozenset[str]]:
    """What Bob hears, what is recorded, and under which keys, when nobody else is there."""
    world, heard = asyncio.run(run(unprefixed, ()))
    assert [status for status, _ in heard] == [
        201,
        200,
        201,
        200,
        200,
        202,
        200,
        202,
        201,
        200,
        200,
        200,
        200,
        200,
        200,
    ]
    return heard, records(world, lambda _: True), frozenset(item.key for item in world.event_writer.appended)


def groups(entries: Iterator[SessionEntry]) -> set[tuple[str | None, str | None]]:
    return {(entry.tenant, entry.spec.group_id) for entry in entries if entry.spec.group_id is not None}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_f1_every_route_is_tried(route: Route) -> None:
    assert kind_of(route.path) is not None, "say in BODIES what this route may be sent"


@given(
    st.sampled_from([None, "alice", "bob"]),
    st.lists(st.lists(actions() | st.just(OPENING), max_size=6), min_size=1, max_size=len(SCRIPT)),
)
def test_f1_f4_nothing_that_others_do_changes_what_a_tenant_reads_or_has(
    unprefixed: str | None, between: list[list[Action]]
) -> None:
    heard, recorded, keys = alone(unprefixed)
    world, heard_among_others = asyncio.run(run(unprefixed, between))
    assert heard_among_others == heard
    assert records(world, keys.__contains__) == recorded
    entries = world.event_writer.of(SESSIONS)
    by_group = groups(entry for entry in entries if isinstance(entry, SessionEntry))
    assert len({group for _, group in by_group}) == len(by_group)
    others = [item for item in world.event_writer.appended if item.key not in keys]
    assert {item.record.tenant for item in others if item.topic is SESSIONS} <= {"alice"}
    alices = {item.key for item in others if item.topic is SESSIONS}
    assert {item.key for item in others if item.topic in (COMPLETIONS, EVALUATIONS)} <= alices


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("key", ["alice", "token", "none", "unknown", "admin"])
def test_f1_no_route_answers_others_about_a_foreign_session(route: Route, key: str) -> None:
    """Each route with another tenant's session in the path and in the header: as with one that does not exist."""

    async def answers(*, there: bool) -> tuple[int, Any]:
        world = World(None)
        if there:
            await world.open(BOB, session_id="x", group_id="g")
        world.tokens["alice"] = (await world.open(ALICE, session_id="own"))["api_key"]
        path = route.path.replace("{session_id}", "x").replace("{model:path}", "m").replace("{policy}", "policy")
        body = {"session_id": "x"} if path == "/v1/sessions" else HI
        found = await world.ask(min(route.methods or ()), path, body, {**keys_of(world, key), "x_session_id": "x"})
        return found[0], without(found[1], "api_key", "environment")

    if key == "admin" and route.path.startswith("/admin"):
        return
    assert asyncio.run(answers(there=True)) == asyncio.run(answers(there=False))
