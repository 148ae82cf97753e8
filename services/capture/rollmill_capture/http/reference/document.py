"""The OpenAPI 3.1 document of capture. Pure."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollmill_capture.errors import EVENT_STREAM, JSON
from rollmill_capture.http.reference.operations import API_OPERATIONS, OWN_OPERATIONS, REASONS, Operation

BASES = ("/sessions/{session_id}", "", "/sessions/{session_id}/v1")
"""Of a session's address; a test compares them with the application's."""
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_REWARD_ALIAS = {"reward": {"type": "number", "description": "Short for `outcome_reward`: give one of them."}}
_INTRODUCTION = """\
Capture is a proxy for the APIs of OpenAI, Anthropic and Gemini, and has an API of its own for sessions.

Where the operator has set keys, a request needs one of the keys that its operation names, as `Authorization: Bearer …`
or where the SDKs of other APIs put it (`x-api-key`, `x-goog-api-key`, `api-key`, the query's `key`). Without keys,
capture listens on this machine alone and no key is needed. A model call names its session by its path, by the session's
token as the API key, or by the header `x-session-id`.

Errors have the format of the API that is called. A path that no route has is 404, and a method that a path does not
take is 405. `GET` paths answer `HEAD`, too. A refusal of the engine is passed on with the engine's own status."""
_KEYS = {
    "session_token": "The session's `api_key`, which opening the session returned.",
    "tenant_key": "The tenant's key; for a model call together with the session in the path or in `x-session-id`.",
    "administrator_key": "The administrator's key.",
}
_PARAMETERS = {
    "session_id": ("path", "Id of the session."),
    "model": ("path", "Name of the model; it may hold slashes."),
    "policy": ("path", "Name of the policy."),
    "x-session-id": ("header", "Id of the session, where neither the path nor the key names it."),
    "x-rollmill-call": ("header", "`agent`: the call is trained. `aux`: it is recorded only."),
    "idempotency-key": ("header", "The same key again in one session gets the same answer; the model is asked once."),
}


@cache
def openapi_document() -> dict[str, Any]:
    """The document; it is not to be changed."""
    operations = all_operations()
    paths: dict[str, Any] = {
        "/openapi.json": {"get": _static("This document", "openapi", JSON)},
        "/docs": {"get": _static("This document as a page", "docs", "text/html; charset=utf-8")},
    }
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rollmill capture",
            "version": version("rollmill"),
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(operations.values()),
            "parameters": {name: _parameter(name, place, about) for name, (place, about) in _PARAMETERS.items()},
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": about} for name, about in _KEYS.items()
            },
        },
    }


def all_operations() -> dict[tuple[str, str], Operation]:
    """Every method and path of capture's own and of all APIs behind every base, beside those of the reference."""
    behind = {
        (method, f"{base}{path}"): operation for base in BASES for (method, path), operation in API_OPERATIONS.items()
    }
    return {**OWN_OPERATIONS, **behind}


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    names = (*re.findall(r"{(\w+)}", path), *operation.headers)
    described: dict[str, Any] = {
        "operationId": _operation_id(method, path),
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [*({key: []} for key in operation.keys), {}],
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in names],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.requires_body,
            "content": {JSON: {"schema": _reference(operation.body)}},
        }
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, model in operation.answers.items():
        content: dict[str, Any] = {JSON: {"schema": _reference(model)}}
        if operation.streams:
            content[EVENT_STREAM] = {"schema": {"type": "string"}}
        found[str(status)] = {"description": _summary(model), "content": content}
    for status in sorted(operation.errors):
        found[str(status)] = _error(REASONS[status], operation.error)
    if operation.tag != "administration" and (operation.streams or operation.tag != "sessions"):
        found["default"] = {"description": "The engine's own refusal, with its status.", "content": {JSON: {}}}
    return found


def _error(about: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": about, "content": {JSON: {"schema": _reference(model)}}}


def _static(summary: str, name: str, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "object" if media_type == JSON else "string"}}}
    return {
        "operationId": f"get_{name}",
        "summary": f"{summary}; no key is needed",
        "tags": ["reference"],
        "security": [],
        "responses": {"200": {"description": summary, "content": content}},
    }


def _schemas(operations: Any) -> dict[str, Any]:
    models: dict[type[BaseModel], None] = {}
    for operation in operations:
        bodies = () if operation.body is None else (operation.body,)
        models |= dict.fromkeys((*bodies, *operation.answers.values(), operation.error))
    _, described = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = _standard(described["$defs"])
    reward = schemas["RewardRequest"]
    reward["properties"] = {**_REWARD_ALIAS, **reward["properties"]}
    # These are read strictly: a name that is no field is refused.
    for name in ("RewardRequest", "StrategySpec", "EvaluatorSpec"):
        schemas[name]["additionalProperties"] = False
    return dict(sorted(schemas.items()))


def _standard(schema: Any) -> Any:
    """Bounds under the names of JSON Schema: for a number with custom validators pydantic keeps its own names."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = _BOUNDS if schema.get("type") == "number" else {}
    return {named.get(key, key): _standard(value) for key, value in schema.items()}


def _parameter(name: str, place: str, about: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": about,
        "schema": {"type": "string", "enum": ["agent", "aux"]} if name == "x-rollmill-call" else {"type": "string"},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or model.__name__).strip().partition("\n")[0]


def _operation_id(method: str, path: str) -> str:
    return method.lower() + "_" + re.sub(r"\W+", "_", path).strip("_")
