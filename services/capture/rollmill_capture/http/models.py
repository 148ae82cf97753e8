"""Lists of models and counts of tokens, in the formats of all APIs. They sample nothing, so they are not recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rollmill.errors import InvalidInputError
from rollmill_capture.apis import anthropic_reply, anthropic_request, gemini_reply, gemini_request
from rollmill_capture.apis.gemini_request import field_of
from rollmill_capture.apis.history_cache import SessionHistory
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.errors import ApiError, ErrorFormat, json_response
from rollmill_capture.http.model_calls import CallContext
from rollmill_capture.upstream.client import Target, UpstreamError
from rollmill_capture.upstream.unusable import unusable_answer

BYTES_PER_TOKEN = 4
"""Of the estimate, where the engine counts nothing: English text in common vocabularies."""
ESTIMATED = {"x-rollmill-estimated": "true"}
OK = 200
RENDERED = ("model", "messages", "tools", "chat_template_kwargs")
"""What of a chat request becomes its prompt."""


@dataclass(frozen=True)
class ModelsApi:
    context: CallContext

    async def models(self, request: Request) -> Response:
        """The upstream's models; in Anthropic's shape for its clients. No session is needed: many clients ask first."""
        await self.context.resolver.require_reader(request)
        status, body = await self._models()
        if status == OK and "anthropic-version" in request.headers:
            body = {"data": [_anthropic_model(name) for name in _names(body)], "has_more": False}
            body |= {"first_id": None, "last_id": None}
        return json_response(body, status)

    async def model(self, request: Request) -> Response:
        """One model of the list."""
        answer = await self.models(request)
        body, name = orjson.loads(answer.body), request.path_params["model"]
        found = [item for item in body.get("data") or () if isinstance(item, dict) and item.get("id") == name]
        if answer.status_code == OK and not found:
            raise ApiError(404, f"the upstream has no model {name!r}")
        return json_response(found[0], OK) if found else answer

    async def gemini_models(self, request: Request) -> Response:
        await self.context.resolver.require_reader(request)
        status, body = await self._models()
        return json_response(
            {"models": [_gemini_model(name) for name in _names(body)]} if status == OK else body, status
        )

    async def count_messages(self, request: Request) -> Response:
        """Anthropic's ``count_tokens``; an estimate, and marked so, where the engine has no route for it."""
        return await self._counted(request, anthropic_reply.ERROR_FORMAT, "input_tokens")

    async def count_gemini(self, request: Request) -> Response:
        return await self._counted(request, gemini_reply.ERROR_FORMAT, "totalTokens")

    async def _counted(self, request: Request, shape: ErrorFormat, name: str) -> Response:
        try:
            entry = await self.context.resolver.calling_session(request)
            raw = await read_body(request, self.context.request_bytes)
            target, fields = self._fields(request, raw, entry.session_id)
            count, exact = await self._count(target, fields)
        except ApiError as refusal:
            return refusal.response(shape)
        return json_response({name: count}, OK, {} if exact else ESTIMATED)

    def _fields(self, request: Request, raw: bytes, session_id: str) -> tuple[Target, dict[str, Any]]:
        history, model = SessionHistory(self.context.history, session_id), request.path_params.get("model")
        try:
            body = parse_object(raw)
            if model is None:
                fields, _ = anthropic_request.chat_fields(body, history)
            else:
                inner = field_of(body, "generateContentRequest") or body
                fields, _ = gemini_request.chat_fields(inner, str(model), history)
        except InvalidInputError as error:
            raise ApiError(400, str(error)) from error
        named = fields.get("model")
        if not isinstance(named, str | None):
            raise ApiError(400, "`model` must be a string", param="model")
        target = self.context.routes.find(named)
        served = {} if target.route.model is None else {"model": target.route.model}
        return target, {key: value for key, value in {**fields, **served}.items() if key in RENDERED}

    async def _count(self, target: Target, fields: dict[str, Any]) -> tuple[int, bool]:
        """Tokens of a prompt, and whether the engine itself counted them."""
        try:
            answer = await self.context.upstream.post(target, "/tokenize", orjson.dumps(fields))
            body = orjson.loads(answer.content) if answer.status_code == OK else None
        except (UpstreamError, orjson.JSONDecodeError):
            body = None
        count = body.get("count") if isinstance(body, dict) else None
        if type(count) is int:
            return count, True
        return len(orjson.dumps([fields.get("messages"), fields.get("tools")])) // BYTES_PER_TOKEN, False

    async def _models(self) -> tuple[int, Any]:
        target = self.context.routes.find(None)
        try:
            answer = await self.context.upstream.models(target)
            status, content = answer.status_code, answer.content
            return status, orjson.loads(content)
        except UpstreamError as error:
            raise ApiError(error.status, str(error), retry=True) from error
        except orjson.JSONDecodeError as error:
            raise ApiError(502, unusable_answer(f"{target.base_url}/models", content), retry=True) from error


def _names(body: Any) -> list[str]:
    data = body.get("data") if isinstance(body, dict) else None
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    return [str(model.get("id")) for model in models]


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _gemini_model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
