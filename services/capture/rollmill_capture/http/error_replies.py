"""Errors that no endpoint answers itself, in the format of the API that the path or the client belongs to."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rollmill_capture.apis import anthropic_reply, gemini_reply
from rollmill_capture.errors import OPENAI, ApiError, ErrorFormat, json_response

ANTHROPIC_HEADER = "anthropic-version"
"""Anthropic's clients send it with every request."""
_GEMINI = ("/v1beta/", "/v1alpha/", ":generateContent", ":streamGenerateContent", ":countTokens")
_METHOD_NOT_ALLOWED = 405


def error_format_of(request: Request) -> ErrorFormat:
    """Anthropic's for its paths and its clients, Gemini's for its paths, and OpenAI's for all others."""
    path = request.url.path
    if ANTHROPIC_HEADER in request.headers or "/v1/messages" in path:
        return anthropic_reply.ERROR_FORMAT
    if any(part in path for part in _GEMINI):
        return gemini_reply.ERROR_FORMAT
    return OPENAI


async def reply_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error.response(error_format_of(request))


async def reply_http_error(request: Request, error: Exception) -> Response:
    """No route has this path (404), or none has this method (405, with the methods in the header ``allow``)."""
    if not isinstance(error, HTTPException):
        raise error
    message, allowed = f"{request.method} {request.url.path}: {error}", (error.headers or {}).get("Allow")
    if error.status_code == _METHOD_NOT_ALLOWED:
        message = f"{message}; this path takes {allowed}"
    body = error_format_of(request).error(error.status_code, message)
    return json_response(body, error.status_code, dict(error.headers or {}))
