"""The HTTP application: routes to handlers, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollmill_capture.admin_api import AdminApi
from rollmill_capture.desk import SessionDesk
from rollmill_capture.replies import JSON, RefusalError, error_body, json_response
from rollmill_capture.routes import RouteTable
from rollmill_capture.session_api import SessionApi
from rollmill_capture.upstream import Upstream, UpstreamError


@dataclass(frozen=True)
class ModelsEndpoint:
    """The upstream's models, for clients that ask before they call. Not recorded."""

    desk: SessionDesk
    routes: RouteTable
    upstream: Upstream

    async def list(self, request: Request) -> Response:
        await self.desk.caller(request)
        try:
            answer = await self.upstream.models(self.routes.find(None))
        except UpstreamError as error:
            raise RefusalError(error.status, str(error), retry=True) from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type", JSON))


def make_application(
    sessions: SessionApi, calls: Sequence[BaseRoute], models: ModelsEndpoint, admin: AdminApi
) -> Starlette:
    """``calls``: the routes of model calls."""
    routes = [
        *calls,
        Route("/v1/sessions", sessions.open, methods=["POST"]),
        Route("/v1/sessions/{session_id}", sessions.look),
        Route("/v1/sessions/{session_id}/close", sessions.close, methods=["POST"]),
        Route("/sessions/{session_id}/v1/models", models.list),
        Route("/v1/models", models.list),
        Route("/admin/policies/{policy}/pause", admin.pause, methods=["POST"]),
        Route("/admin/policies/{policy}/resume", admin.resume, methods=["POST"]),
        Route("/admin/policies/{policy}/status", admin.status),
    ]
    return Starlette(routes=routes, exception_handlers={RefusalError: _refuse, HTTPException: _refuse_http})


async def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, RefusalError):
        raise error
    return error.response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return json_response(error_body(status, f"{request.method} {request.url.path}: {error}"), status)
