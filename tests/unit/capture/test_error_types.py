"""Errors as the APIs' stock clients know them: type, status and the class that a client raises."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from starlette.applications import Starlette

from rollmill.models import SessionEntry, SessionSpec, SessionState
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.errors import error_body
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.keys import digest_of
from rollmill_capture.http.server import listen, serve
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

KEY, TOKEN, WAIT = "a-tenants-key", "rm-token", 10.0
HI: Any = [{"role": "user", "content": "hi"}]
BASE = "http://capture"
LIST = {"object": "list", "data": [{"id": "toy", "object": "model", "created": 0, "owned_by": "vllm"}]}


def application(status: int = 200, *, keys: bool = False) -> Starlette:
    """Capture before an engine that answers model calls with ``status``, with the sessions ``s`` and ``closed``."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=LIST)
        return httpx.Response(status, json={"error": {"message": "the engine's own words", "code": status}})

    sessions, tenant = SessionTable(), "alice" if keys else None
    for name, state in {"s": SessionState.OPEN, "closed": SessionState.CLOSED}.items():
        token = digest_of(f"{TOKEN}-{name}")
        sessions.apply(
            SessionEntry(
                session_id=name,
                state=state,
                spec=SessionSpec(),
                opened_at=0.0,
                token=token if keys else None,
                tenant=tenant,
            )
        )
    return assemble(
        CaptureParts(
            settings=CaptureSettings(api_keys={"alice": hashlib.sha256(KEY.encode()).hexdigest()} if keys else {}),
            sessions=sessions,
            position=CaughtUp(),
            announced=AnnouncedVersions(),
            event_writer=MemoryEventWriter(),
            upstream=Upstream(httpx.AsyncClient(transport=httpx.MockTransport(answer))),
            clock=ManualClock(),
            metrics=Metrics("capture"),
        )
    )


def client(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=BASE)


def openai_client(app: Starlette, base_url: str = f"{BASE}/v1", key: str = "s") -> openai.AsyncOpenAI:
    http: Any = client(app)  # it takes httpx's client, too
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http)


@asynccontextmanager
async def anthropic_client(app: Starlette, key: str = "anything") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Over a connection: it takes no client of another library's."""
    settings, stop = CaptureSettings(port=free_port()), asyncio.Event()
    with listen(settings) as listener:
        serving = asyncio.create_task(serve(app, listener, settings, stop))
        async with anthropic.AsyncAnthropic(base_url=settings.public, api_key=key, max_retries=0) as asked:
            yield asked
        stop.set()
        await serving


@pytest.fixture(autouse=True)
async def _in_time() -> AsyncIterator[None]:
    async with asyncio.timeout(WAIT):
        yield


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (409, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_b16_the_type_of_an_error_follows_its_status(status: int, kind: str) -> None:
    assert error_body(status, "")["error"]["type"] == kind


@pytest.mark.parametrize(
    ("path", "key", "kind", "error_type"),
    [
        ("/v1", "rm-unknown", openai.AuthenticationError, "authentication_error"),
        ("/v1", f"{TOKEN}-closed", openai.ConflictError, "invalid_request_error"),
        ("/sessions/none/v1", KEY, openai.NotFoundError, "not_found_error"),
        ("/nowhere", KEY, openai.NotFoundError, "not_found_error"),
    ],
)
async def test_b16_openais_client_raises_the_class_of_the_error(
    path: str, key: str, kind: type[openai.APIStatusError], error_type: str
) -> None:
    with pytest.raises(kind) as raised:
        await openai_client(application(keys=True), BASE + path, key).chat.completions.create(model="toy", messages=HI)
    assert raised.value.type == error_type


@pytest.mark.parametrize(
    ("key", "status", "kind", "error_type"),
    [
        ("rm-unknown", 200, anthropic.AuthenticationError, "authentication_error"),
        (f"{TOKEN}-closed", 200, anthropic.ConflictError, "invalid_request_error"),
        (f"{TOKEN}-s", 429, anthropic.RateLimitError, "rate_limit_error"),
        (f"{TOKEN}-s", 500, anthropic.InternalServerError, "api_error"),
        (f"{TOKEN}-s", 413, anthropic.RequestTooLargeError, "request_too_large"),
    ],
)
async def test_b16_anthropics_client_raises_the_class_of_the_error(
    key: str, status: int, kind: type[anthropic.APIStatusError], error_type: str
) -> None:
    async with anthropic_client(application(status, keys=True), key) as asked:
        with pytest.raises(kind) as raised:
            await asked.messages.create(model="toy", max_tokens=9, messages=HI)
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", error_type)


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v1/chat/completions", {}, {"type": "invalid_request_error"}),
        ("/v1/sessions", {}, {"type": "invalid_request_error"}),
        ("/v1/messages", {}, {"type": "invalid_request_error"}),
        ("/v1beta/models/toy:generateContent", {}, {"status": "INVALID_ARGUMENT"}),
    ],
)
async def test_b16_a_wrong_method_is_an_invalid_request_that_names_the_right_one(
    path: str, headers: dict[str, str], body: dict[str, str]
) -> None:
    answer = await client(application()).delete(path, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert body.items() <= error.items()
    assert error["message"].endswith("this path takes POST")


async def test_b16_models_are_listed_without_a_session_where_no_keys_are_required() -> None:
    app = application()
    assert [model.id async for model in openai_client(app, key="anything").models.list()] == ["toy"]
    async with anthropic_client(app) as asked:
        assert [model.id async for model in asked.models.list()] == ["toy"]
    assert (await client(app).get("/v1/models")).json() == LIST
    assert (await client(app).get("/v1/models/toy")).json()["id"] == "toy"
    assert (await client(app).get("/v1beta/models")).json()["models"][0]["name"] == "models/toy"


@pytest.mark.parametrize(("key", "listed"), [(KEY, True), (f"{TOKEN}-s", True), ("rm-unknown", False), (None, False)])
async def test_b16_models_are_listed_for_a_tenant_or_a_session_where_keys_are_required(
    key: str | None, listed: bool
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await client(application(keys=True)).get("/v1/models", headers=headers)
    if listed:
        assert (answer.status_code, answer.json()) == (200, LIST)
    else:
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_b16_geminis_client_raises_the_class_of_the_error() -> None:
    options = genai.types.HttpOptions(
        base_url=BASE, httpx_async_client=client(application(keys=True)), retry_options=None
    )
    asked = genai.Client(api_key="rm-unknown", http_options=options)
    with pytest.raises(genai.errors.ClientError) as raised:
        await asked.aio.models.generate_content(model="toy", contents="hi")
    assert (raised.value.code, raised.value.status) == (401, "UNAUTHENTICATED")
