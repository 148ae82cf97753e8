"""The OpenAPI document of capture: it is valid, names every route, and real answers are as it says."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from rollmill_capture.http.reference.document import openapi_document
from rollmill_capture.http.reference.generate import reference_files
from tests.fuzz.capture_rig import ADMIN, SESSION, TENANTS, CaptureRig, bearer

ROOT = Path(__file__).parents[3]
WAIT = 10.0
HI: dict[str, Any] = {"model": "m-test", "messages": [{"role": "user", "content": "hi"}]}
SAID: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
OPEN: dict[str, Any] = {"session_id": "new", "evaluators": [{"strategy": "external", "name": "human"}]}
TENANT, OTHER, WRONG = TENANTS["a"], TENANTS["b"], "rm-wrong"
OF_SESSION = f"/sessions/{SESSION}"


def test_b15_the_document_is_valid_openapi() -> None:
    validate(openapi_document())
    assert openapi_document()["openapi"] == "3.1.0"


@pytest.mark.parametrize("path", sorted(reference_files(ROOT)), ids=lambda path: path.name)
def test_b15_the_committed_reference_is_as_it_would_be_generated_now(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == reference_files(ROOT)[path], "run `make schemas` and commit"


def test_b15_the_document_has_every_route_and_no_other() -> None:
    documented = {(method.upper(), path) for path, methods in openapi_document()["paths"].items() for method in methods}
    served = {
        (method, re.sub(r":path}", "}", route.path))
        for route in CaptureRig().app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == documented


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in openapi_document()["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            yield f"{name}.{field}", described


def test_b15_every_field_has_a_description() -> None:
    bare = [name for name, field in properties() if "description" not in field and "$ref" not in field]
    assert bare == []
    opening = openapi_document()["components"]["schemas"]["OpenSessionRequest"]["properties"]
    assert {"deadline_seconds", "reward_rule", "group_size", "purpose"} <= set(opening)
    assert all("description" in field for field in opening.values())


def test_b15_every_operation_says_what_it_answers_and_which_keys_it_takes() -> None:
    for path, methods in openapi_document()["paths"].items():
        for operation in methods.values():
            assert any(status.startswith("2") for status in operation["responses"]), path
            assert operation["security"] or operation["tags"] == ["reference"], path


async def test_b15_the_page_needs_no_key_and_loads_nothing() -> None:
    async with client() as http:
        page, document = await http.get("/docs"), await http.get("/openapi.json")
    assert (page.status_code, document.json()) == (200, openapi_document())
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|<script|<link|<img|@import|url\(", page.text)
    for path in openapi_document()["paths"]:
        assert path in page.text


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=CaptureRig().app), base_url="http://capture")


REQUESTS: list[tuple[str, str, str, str | None, Any, int]] = [
    ("POST", "/v1/sessions", "", TENANT, OPEN, 201),
    ("POST", "/v1/sessions", "", TENANT, {"session_id": SESSION, **{k: OPEN[k] for k in ("evaluators",)}}, 200),
    ("POST", "/v1/sessions", "", TENANT, {"session_id": SESSION, "task_id": "other"}, 409),
    ("POST", "/v1/sessions", "", TENANT, {"evaluator": []}, 422),
    ("POST", "/v1/sessions", "", WRONG, OPEN, 401),
    ("POST", "/v1/sessions", "", TENANT, {"metadata": {"x": "y" * 2**20}}, 413),
    ("GET", "/v1/sessions/{session_id}", f"/v1/sessions/{SESSION}", TENANT, None, 200),
    ("GET", "/v1/sessions/{session_id}", f"/v1/sessions/{SESSION}", OTHER, None, 404),
    ("POST", "/v1/sessions/{session_id}/reward", f"/v1/sessions/{SESSION}/reward", TENANT, {"reward": 1.0}, 202),
    ("POST", "/v1/sessions/{session_id}/reward", f"/v1/sessions/{SESSION}/reward", TENANT, {"reward": "1"}, 422),
    ("POST", "/v1/sessions/{session_id}/reward", f"/v1/sessions/{SESSION}/reward", WRONG, {"reward": 1.0}, 401),
    ("POST", "/v1/sessions/{session_id}/close", f"/v1/sessions/{SESSION}/close", "token", {"reward": 1.0}, 403),
    ("POST", "/v1/sessions/{session_id}/close", f"/v1/sessions/{SESSION}/close", TENANT, {"output": {"a": 7}}, 200),
    ("POST", "/admin/policies/{policy}/pause", "/admin/policies/policy/pause", ADMIN, {"seconds": 0}, 200),
    ("POST", "/admin/policies/{policy}/pause", "/admin/policies/policy/pause", ADMIN, {"mode": "no"}, 422),
    ("POST", "/admin/policies/{policy}/pause", "/admin/policies/policy/pause", TENANT, {}, 403),
    ("POST", "/admin/policies/{policy}/resume", "/admin/policies/policy/resume", ADMIN, {"version": [0, 1]}, 200),
    ("GET", "/admin/policies/{policy}/status", "/admin/policies/policy/status", ADMIN, None, 200),
    ("POST", "/v1/chat/completions", "", "token", HI, 200),
    ("POST", "/v1/chat/completions", "", WRONG, HI, 401),
    ("POST", "/v1/messages", "", "token", {"max_tokens": 9, **HI}, 200),
    ("POST", "/v1/messages", "", WRONG, {"max_tokens": 9, **HI}, 401),
    ("POST", "/v1/responses", "", "token", {"model": "m-test", "input": "hi"}, 200),
    ("POST", "/v1/completions", "", "token", {"model": "m-test", "prompt": "hi"}, 200),
    ("POST", "/v1beta/models/{model}:generateContent", "/v1beta/models/m:generateContent", "token", SAID, 200),
    ("POST", "/v1beta/models/{model}:generateContent", "/v1beta/models/m:generateContent", WRONG, SAID, 401),
    ("POST", "/v1beta/models/{model}:countTokens", "/v1beta/models/m:countTokens", "token", SAID, 200),
    ("POST", "/v1/messages/count_tokens", "", "token", HI, 200),
    ("GET", "/v1/models", "", TENANT, None, 200),
    ("GET", "/v1/models", "", None, None, 401),
    ("GET", "/v1/models/{model}", "/v1/models/none", "token", None, 404),
    ("GET", "/v1beta/models", "", WRONG, None, 401),
    ("POST", "/sessions/{session_id}/v1/chat/completions", f"{OF_SESSION}/v1/chat/completions", TENANT, HI, 200),
    ("POST", "/sessions/{session_id}/v1/chat/completions", f"{OF_SESSION}/v1/chat/completions", OTHER, HI, 404),
]


@pytest.mark.parametrize(("method", "template", "path", "key", "body", "status"), REQUESTS)
async def test_b15_a_real_answer_is_as_the_document_says(
    method: str, template: str, path: str, key: str | None, body: Any, status: int
) -> None:
    rig = CaptureRig()
    async with asyncio.timeout(WAIT):
        await rig.open_session()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=rig.app), base_url="http://capture") as http:
            headers = bearer(rig.token if key == "token" else key)
            answer = await http.request(method, path or template, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    operation = openapi_document()["paths"][template][method.lower()]
    check(operation["responses"][str(status)], answer.json())
    if body is not None and status < 300:
        check(operation["requestBody"], body)


def check(described: dict[str, Any], value: object) -> None:
    schema = described["content"]["application/json"]["schema"]
    whole = {**schema, "components": openapi_document()["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


@pytest.mark.parametrize("body", [{"evaluator": []}, {"group_size": 0}, {"deadline_seconds": 0}, {"purpose": "play"}])
def test_b15_the_document_refuses_the_mistakes_that_capture_refuses(body: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(openapi_document()["paths"]["/v1/sessions"]["post"]["requestBody"], body)
