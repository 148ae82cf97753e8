"""The HTTP application: routes to handlers, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollmill_capture.errors import ApiError, error_body, json_response
from rollmill_capture.http.admin import AdminApi
from rollmill_capture.http.rewards import RewardApi
from rollmill_capture.http.sessions import SessionApi


def make_application(sessions: SessionApi, calls: Sequence[BaseRoute], admin: AdminApi) -> Starlette:
    """``calls``: the routes of the models' APIs."""
    routes = [
        *calls,
        Route("/v1/sessions", sessions.open, methods=["POST"]),
        Route("/v1/sessions/{session_id}", sessions.look),
        Route("/v1/sessions/{session_id}/close", sessions.close, methods=["POST"]),
        Route("/v1/sessions/{session_id}/reward", RewardApi.beside(sessions).reward, methods=["POST"]),
        Route("/admin/policies/{policy}/pause", admin.pause, methods=["POST"]),
        Route("/admin/policies/{policy}/resume", admin.resume, methods=["POST"]),
        Route("/admin/policies/{policy}/status", admin.status),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _refuse, HTTPException: _refuse_http})


async def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return json_response(error_body(status, f"{request.method} {request.url.path}: {error}"), status)
