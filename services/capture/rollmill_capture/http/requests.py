"""What every request is asked first: its key, its session, its JSON body; and whether the key may do this.

Settings hold digests of keys, never keys, and every comparison takes the same time whatever it compares.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Scope

from rollmill.errors import InvalidInputError
from rollmill.models import SessionEntry, SessionState, is_identifier
from rollmill_capture.coordination.session_table import InFlight, Position, SessionTable
from rollmill_capture.errors import ApiError
from rollmill_capture.settings import CaptureSettings

SESSION_HEADER = "x-session-id"
TENANT = "tenant"
"""Field of a session's metadata: the tenant that opened it. Not for clients to set where keys are needed."""

FEW_LEVELS = 200
"""A JSON body with as many levels can be recorded."""
LEVELS_AROUND = 32

_BEARER = "bearer "
_TOKEN = "rm-"  # noqa: S105  # only the beginning, so that people recognise one
_KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")
"""Where the SDKs of other APIs put the key."""


def digest_of(key: str) -> str:
    """SHA-256 (hex) of a key. Keys are long and random, so that nothing slower is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_token() -> str:
    """A session's API key: 192 random bits."""
    return _TOKEN + secrets.token_urlsafe(24)


def is_token_of(key: str | None, digest: str | None) -> bool:
    """Whether ``key`` is the token with this digest; None: there is none."""
    return key is not None and digest is not None and hmac.compare_digest(digest_of(key), digest)


def presented_key(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The key that a request carries, wherever its SDK puts it; header names in lower case."""
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(_BEARER):
        return authorization[len(_BEARER) :].strip() or None
    found = (headers.get(name) for name in _KEY_HEADERS)
    return next((key for key in found if key), None) or query.get("key") or None


class Keys:
    """The keys that are accepted, by their digests."""

    def __init__(self, tenants: Mapping[str, str], admin: str | None) -> None:
        self._tenants = {tenant: digest.lower() for tenant, digest in tenants.items()}
        self._admin = None if admin is None else admin.lower()

    @property
    def required(self) -> bool:
        """Whether calls need a key at all."""
        return bool(self._tenants)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant with this key; None: no tenant has it."""
        digest = digest_of(key or "")
        matches = [tenant for tenant, known in self._tenants.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def is_admin(self, key: str | None) -> bool:
        """Whether the key may steer capture. Where no keys are required, everybody may."""
        if self._admin is None:
            return not self.required
        return hmac.compare_digest(digest_of(key or ""), self._admin)


NO_KEYS = Keys({}, None)


def accepted_keys(settings: CaptureSettings) -> Keys:
    """The keys that the settings name. Raises ConfigurationError where the file of keys cannot be read."""
    return Keys(settings.key_digests, settings.admin_key_sha256)


@dataclass(frozen=True)
class SessionResolver:
    """Finds the session of a request, by its path, by header or by API key, and checks whether the key may use it."""

    table: SessionTable
    position: Position
    lookup_seconds: float
    keys: Keys = NO_KEYS
    in_flight: InFlight = field(default_factory=InFlight)

    async def calling_session(self, request: Request) -> SessionEntry:
        """The open session that a call belongs to. Raises ApiError (401, 404, 409)."""
        key = key_of(request)
        session_id: str | None = request.path_params.get("session_id") or request.headers.get(SESSION_HEADER)
        if session_id:
            entry = self._authorized(await self.get(session_id), key)
        elif key is None:
            raise ApiError(
                401,
                f"the session of this call is not named: use a session's base_url, the header {SESSION_HEADER}, or its "
                "api_key as the API key",
            )
        else:
            entry = await self._session_of_token(key)
        if entry.state is SessionState.CLOSED or self.in_flight.is_closing(entry.session_id):
            raise ApiError(409, f"session {entry.session_id!r} is closed and takes no more calls")
        return entry

    async def idempotency_scope(self, scope: Scope) -> str | None:
        """What a client's idempotency keys are unique in: its session's attempt. None: it may not call."""
        try:
            entry = await self.calling_session(Request(scope))
        except ApiError:
            return None
        return f"{entry.session_id}:{entry.attempt}"

    async def owned_session(self, request: Request, session_id: str) -> SessionEntry:
        """The session, where the request may see and close it. Raises ApiError (401, 404)."""
        return self._authorized(await self.get(session_id), key_of(request))

    async def get(self, session_id: str) -> SessionEntry:
        """The session's entry, waited for if unknown (rule S3). Raises ApiError (404)."""
        found = is_identifier(session_id)
        entry = await self.table.find(session_id, self.position, self.lookup_seconds) if found else None
        if entry is None:
            raise ApiError(
                404,
                f"there is no session {session_id!r}: open one with POST /v1/sessions and use its base_url, or send "
                f"its id in the header {SESSION_HEADER} or its api_key as the API key",
            )
        return entry

    async def newest(self, session_id: str) -> SessionEntry | None:
        """The entry with all that other replicas have written by now: for what must not be written twice."""
        await self.catch_up()
        return self.table.get(session_id)

    async def catch_up(self) -> None:
        """Read what other replicas have written by now, for ``lookup_seconds`` at most."""
        await self.table.catch_up(self.position, self.lookup_seconds)

    def tenant_of(self, request: Request) -> str | None:
        """The tenant of a request's key; None where keys are not required. Raises ApiError (401)."""
        tenant = self.keys.tenant_of(key_of(request))
        if tenant is None and self.keys.required:
            raise ApiError(401, "a tenant's key is needed: send it as `Authorization: Bearer …`")
        return tenant

    def require_admin(self, request: Request) -> None:
        """Raises ApiError (403) for everybody but the administrator."""
        if not self.keys.is_admin(key_of(request)):
            raise ApiError(403, "the administrator's key is needed (its digest is ROLLMILL_ADMIN_KEY_SHA256)")

    async def _session_of_token(self, key: str) -> SessionEntry:
        """The session with this token; where keys are not required, its id will do."""
        digest = digest_of(key)
        entry = self.table.of_token(digest)
        if entry is None and not self.keys.required and self.table.get(key) is not None:
            return await self.get(key)
        if entry is None:
            await self.catch_up()
            entry = self.table.of_token(digest)
        if entry is not None:
            return entry
        if self.keys.required:
            raise ApiError(401, "the API key is no session's; use the api_key that opening a session returned")
        return await self.get(key)

    def _authorized(self, entry: SessionEntry, key: str | None) -> SessionEntry:
        """Where keys are required, a session may be used with its own token, and by the tenant that opened it."""
        if not self.keys.required or is_token_of(key, entry.token):
            return entry
        tenant = self.keys.tenant_of(key)
        if tenant is None:
            raise ApiError(401, "the API key is neither a tenant's nor the session's")
        if tenant != entry.spec.metadata.get(TENANT):
            raise ApiError(404, f"there is no session {entry.session_id!r}")
        return entry


def key_of(request: Request) -> str | None:
    return presented_key(request.headers, request.query_params)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError (413) over ``limit`` bytes, and starlette's ClientDisconnect."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise ApiError(413, f"the request is over {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty one. Raises InvalidInputError, also where it cannot be recorded."""
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError("the request body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > FEW_LEVELS and _is_too_deep(body):
        raise InvalidInputError(f"the request body is nested too deep: {FEW_LEVELS} levels are always accepted")
    return body


def _is_too_deep(body: object) -> bool:
    """Serialisers stop at some 250 levels, and the records of a body have a few around it."""
    for _ in range(LEVELS_AROUND):
        body = [body]
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        return True
    return False
