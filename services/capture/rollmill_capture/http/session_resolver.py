"""Who is calling: the session of a request, by its path, by header, or by API key; and whether it may."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from rollmill.models import SessionEntry, SessionState, is_identifier
from rollmill_capture.auth import TENANT, Keys, digest_of, is_token_of, presented_key
from rollmill_capture.coordination.session_table import InFlight, Position, SessionTable
from rollmill_capture.errors import ApiError

HEADER = "x-session-id"
NO_KEYS = Keys({}, None)


@dataclass(frozen=True)
class SessionResolver:
    """What all handlers know about sessions."""

    table: SessionTable
    position: Position
    lookup_seconds: float
    keys: Keys = NO_KEYS
    in_flight: InFlight = field(default_factory=InFlight)

    async def find(self, session_id: str) -> SessionEntry | None:
        """The session's entry, waited for as rule S3 says; None: there is none."""
        if not is_identifier(session_id):
            return None
        return await self.table.find(session_id, self.position, self.lookup_seconds)

    async def newest(self, session_id: str) -> SessionEntry | None:
        """The same with all that other replicas have written by now: for what must not be written twice."""
        await self.table.catch_up(self.position, self.lookup_seconds)
        return self.table.get(session_id)

    async def known(self, session_id: str) -> SessionEntry:
        """The session's entry. Raises RefusalError (404)."""
        entry = await self.find(session_id)
        if entry is None:
            raise ApiError(
                404,
                f"there is no session {session_id!r}: open one with POST /v1/sessions and use its base_url, or send "
                f"its id in the header {HEADER} or its api_key as the API key",
            )
        return entry

    async def caller(self, request: Request) -> SessionEntry:
        """The open session that a request belongs to. Raises RefusalError (401, 404, 409)."""
        entry = await self._named(request)
        if entry.state is SessionState.CLOSED or self.in_flight.is_closing(entry.session_id):
            raise ApiError(409, f"session {entry.session_id!r} is closed and takes no more calls")
        return entry

    async def named_for_retries(self, scope: Scope) -> str | None:
        """What a client's idempotency keys are unique in: its session's attempt. None: it may not call."""
        try:
            entry = await self.caller(Request(scope))
        except ApiError:
            return None
        return f"{entry.session_id}:{entry.attempt}"

    async def owned(self, request: Request, session_id: str) -> SessionEntry:
        """The session, where the request may see and close it. Raises RefusalError (401, 404)."""
        return self._admitted(await self.known(session_id), key_of(request))

    def tenant(self, request: Request) -> str | None:
        """Whose key a request carries; None where none is asked for. Raises RefusalError (401)."""
        tenant = self.keys.tenant(key_of(request))
        if tenant is None and self.keys.asked_for:
            raise ApiError(401, "a tenant's key is needed: send it as `Authorization: Bearer …`")
        return tenant

    def admin(self, request: Request) -> None:
        """Raises RefusalError (403) for everybody but the administrator."""
        if not self.keys.is_admin(key_of(request)):
            raise ApiError(403, "the administrator's key is needed (its digest is ROLLMILL_ADMIN_KEY_SHA256)")

    async def _named(self, request: Request) -> SessionEntry:
        key = key_of(request)
        session_id: str | None = request.path_params.get("session_id") or request.headers.get(HEADER)
        if session_id:
            return self._admitted(await self.known(session_id), key)
        if key is None:
            raise ApiError(
                401, f"whose call is this? Use a session's base_url, the header {HEADER}, or its api_key as the API key"
            )
        return await self._of_token(key)

    async def _of_token(self, key: str) -> SessionEntry:
        """The session whose token this is; where no keys are asked for, its id will do."""
        digest = digest_of(key)
        entry = self.table.of_token(digest)
        if entry is None and not self.keys.asked_for and self.table.get(key) is not None:
            return await self.known(key)
        if entry is None:
            await self.table.catch_up(self.position, self.lookup_seconds)
            entry = self.table.of_token(digest)
        if entry is not None:
            return entry
        if self.keys.asked_for:
            raise ApiError(401, "the API key is no session's; use the api_key that opening a session returned")
        return await self.known(key)

    def _admitted(self, entry: SessionEntry, key: str | None) -> SessionEntry:
        """Where keys are asked for, a session is its own token's, and the tenant's that opened it."""
        if not self.keys.asked_for or is_token_of(key, entry.token):
            return entry
        tenant = self.keys.tenant(key)
        if tenant is None:
            raise ApiError(401, "the API key is neither a tenant's nor the session's")
        if tenant != entry.spec.metadata.get(TENANT):
            raise ApiError(404, f"there is no session {entry.session_id!r}")
        return entry


def key_of(request: Request) -> str | None:
    return presented_key(request.headers, request.query_params)
