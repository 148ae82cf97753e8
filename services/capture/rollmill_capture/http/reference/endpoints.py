"""Serves the reference, without a key: it holds nothing of a tenant's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from rollmill_capture.errors import json_response
from rollmill_capture.http.reference.document import openapi_document
from rollmill_capture.http.reference.rendering import page


def reference_routes() -> list[Route]:
    """``/openapi.json`` and ``/docs``."""
    return [Route("/openapi.json", _openapi), Route("/docs", _page)]


async def _openapi(_: Request) -> Response:
    return json_response(openapi_document())


async def _page(_: Request) -> Response:
    return HTMLResponse(page(openapi_document()))
