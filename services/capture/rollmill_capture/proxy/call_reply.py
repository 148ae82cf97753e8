"""What a call ends with when it is no whole reply: the result for the log, and the answer for the client. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import httpx
import orjson
from starlette.responses import Response

from rollmill.models import CallStatus
from rollmill_capture.apis.api import ResponseFormatter
from rollmill_capture.apis.openai import PassthroughFormatter
from rollmill_capture.errors import JSON, ApiError, json_response
from rollmill_capture.proxy.recorder import CallResult
from rollmill_capture.upstream.client import BAD_GATEWAY, UpstreamError
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, error_of
from rollmill_capture.upstream.unusable import unusable_answer

OK = 200
_OF_GATEWAYS = (429, 502, 503, 504)
"""Statuses that a load balancer before the engine answers with, often with a page."""
PASSED_ON = ("retry-after", "x-should-retry")
"""Headers of a refusal that tell clients what to do."""


@dataclass(frozen=True)
class CallReply:
    """What goes into the log, and what the client gets once it is there: a whole response, the end of its stream, or
    an error.
    """

    result: CallResult
    reply: Response | bytes | ApiError


def refused(formatter: ResponseFormatter, response: httpx.Response, body: bytes) -> CallReply:
    """The upstream's refusal is passed on: as it is, or in the format of the caller's API where that is another.

    A web page is no refusal of a model server: it is an error that names the address.
    """
    status, headers = response.status_code, response.headers
    if status not in _OF_GATEWAYS and headers.get("content-type", "").startswith("text/html"):
        fault = unusable_answer(f"{response.url} ({status})", body)
        return CallReply(CallResult(CallStatus.ERROR, http_status=status, error=fault), ApiError(BAD_GATEWAY, fault))
    loaded = _loaded(body)
    message = error_of(loaded) or body[:200].decode("utf-8", "replace")
    hints = {name: headers[name] for name in PASSED_ON if name in headers}
    reply = Response(body, status, hints, headers.get("content-type", JSON))
    if not isinstance(formatter, PassthroughFormatter):
        reply = json_response(formatter.error_format.error(status, message), status, hints)
    kept = body if isinstance(loaded, (dict, list)) and body[:1] in (b"{", b"[") else None
    return CallReply(CallResult(CallStatus.ERROR, http_status=status, error=message, response=kept), reply)


def unanswered(error: UpstreamError) -> CallReply:
    """There is no answer, or it broke off before anything of it could be read."""
    status = CallStatus.INCOMPLETE if error.began else CallStatus.ERROR
    return CallReply(CallResult(status, error=str(error)), ApiError(error.status, str(error), retry=True))


def incomplete(parsed: ParsedReply, cause: Exception | None = None, *, not_continued: bool = False) -> CallReply:
    """Status 200, and yet no whole reply. ``not_continued``: the engine broke it off, and ``cause`` is why it ends."""
    parsed = replace(parsed, incomplete=parsed.incomplete or "no_terminal_frame")
    detail = parsed.error or (str(cause) if cause is not None else "")
    message = f"{parsed.incomplete}: {detail}" if detail else str(parsed.incomplete)
    metadata = {"not_continued": str(cause)} if not_continued else {}
    result = CallResult(CallStatus.INCOMPLETE, parsed, OK, error=message, metadata=metadata)
    return CallReply(result, ApiError(BAD_GATEWAY, f"the upstream's reply is not whole ({message})", retry=True))


def _loaded(body: bytes) -> object:
    try:
        loaded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return loaded
