"""Who is calling: the session of a request, by its path, by header, or by API key."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from rollmill.models import SessionEntry, SessionState, is_identifier
from rollmill_capture.replies import RefusalError
from rollmill_capture.sessions import InFlight, Position, SessionTable

HEADER = "x-session-id"
_BEARER = "bearer "


@dataclass(frozen=True)
class SessionDesk:
    """What all handlers know about sessions."""

    table: SessionTable
    position: Position
    lookup_seconds: float
    in_flight: InFlight = field(default_factory=InFlight)

    async def find(self, session_id: str) -> SessionEntry | None:
        """The session's entry, waited for as RULES S3 says; None: there is none."""
        if not is_identifier(session_id):
            return None
        return await self.table.find(session_id, self.position, self.lookup_seconds)

    async def known(self, session_id: str) -> SessionEntry:
        """The session's entry. Raises RefusalError (404)."""
        entry = await self.find(session_id)
        if entry is None:
            raise RefusalError(
                404,
                f"there is no session {session_id!r}: open one with POST /v1/sessions and use its base_url, or send "
                f"its id in the header {HEADER} or as the API key",
            )
        return entry

    async def caller(self, request: Request) -> SessionEntry:
        """The open session that a request belongs to. Raises RefusalError (401, 404, 409)."""
        entry = await self.known(named_session(request))
        if entry.state is SessionState.CLOSED or self.in_flight.is_closing(entry.session_id):
            raise RefusalError(409, f"session {entry.session_id!r} is closed and takes no more calls")
        return entry


def named_session(request: Request) -> str:
    """The session id that a request names. Raises RefusalError (401) where it names none."""
    path: str | None = request.path_params.get("session_id")
    named = path or request.headers.get(HEADER) or _api_key(request)
    if not named:
        raise RefusalError(
            401, f"whose call is this? Use a session's base_url, the header {HEADER}, or its id as the API key"
        )
    return named


def _api_key(request: Request) -> str | None:
    authorization = request.headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None
