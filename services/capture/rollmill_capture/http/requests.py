"""What every request is asked first: its key and its session; and whether the key may do this.

Ownership is decided here alone, by `SessionResolver`; the endpoints get a session that the request may use, or an error
in which a session of another tenant is one that does not exist (rule S6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from rollmill.errors import InvalidInputError
from rollmill.models import SessionEntry, SessionSpec, SessionState, is_identifier
from rollmill_capture.coordination.session_table import InFlight, Position, SessionTable
from rollmill_capture.coordination.tenants import PREFIX_LENGTH, Tenant, TenantNames
from rollmill_capture.errors import ApiError
from rollmill_capture.http.keys import NO_KEYS, TOKEN_START, Keys, digest_of

SESSION_HEADER = "x-session-id"
_BEARER = "bearer "
_KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")
"""Where the SDKs of other APIs put the key."""
UNKNOWN_KEY = "the API key is neither a tenant's nor this session's"


Presented = tuple[str, ...]
"""The keys of one request."""


def presented_keys(headers: Mapping[str, str], query: Mapping[str, str]) -> Presented:
    """All keys that a request carries, wherever SDKs put them; header names in lower case.

    A process may have several: a harness sends its own key beside the session's, and each is tried.
    """
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""
    found = (bearer, *(headers.get(name) for name in _KEY_HEADERS), query.get("key"))
    return tuple(dict.fromkeys(key for key in found if key))


def keys_of(request: Request) -> Presented:
    return presented_keys(request.headers, request.query_params)


@dataclass(frozen=True)
class Access:
    """A session, and by which right the request has it."""

    entry: SessionEntry
    by_tenant: bool
    """False: by the session's own token, which agents have."""


@dataclass(frozen=True)
class SessionResolver:
    """Finds the session of a request, by its path, by its keys or by a header, and checks whether it may use it."""

    table: SessionTable
    position: Position
    lookup_seconds: float
    keys: Keys = NO_KEYS
    names: TenantNames = field(default_factory=TenantNames)
    in_flight: InFlight = field(default_factory=InFlight)

    async def calling_session(self, request: Request) -> SessionEntry:
        """The open session that a call belongs to. Raises ApiError (401, 404, 409)."""
        presented, in_path = keys_of(request), request.path_params.get("session_id")
        if in_path:
            entry = (await self._access(presented, in_path)).entry
        elif self.keys.required:
            entry = await self._session_of_keys(presented, request.headers.get(SESSION_HEADER))
        else:
            entry = await self._session_without_keys(presented, request.headers.get(SESSION_HEADER))
        if entry.state is SessionState.CLOSED or self.in_flight.is_closing(entry.session_id):
            raise ApiError(409, f"session {self.name_of(entry)!r} is closed and takes no more calls")
        return entry

    async def require_reader(self, request: Request) -> None:
        """For what is no session's own: a tenant's key or a session's token, where keys are required. A session in the
        path has to be open. Raises ApiError (401, 404, 409).
        """
        presented = keys_of(request)
        if request.path_params.get("session_id"):
            await self.calling_session(request)
        elif self.keys.required and not self.keys.tenants_of(presented):
            await self._session_of_keys(presented, None)

    async def idempotency_scope(self, scope: Scope) -> str | None:
        """What a client's idempotency keys are unique in: its session's attempt. None: it may not call."""
        try:
            entry = await self.calling_session(Request(scope))
        except ApiError:
            return None
        return f"{entry.session_id}:{entry.attempt}"

    async def access(self, request: Request) -> Access:
        """The session in the path, for its tenant or by its token. Raises ApiError (401, 404)."""
        return await self._access(keys_of(request), request.path_params["session_id"])

    async def tenants_session(self, request: Request) -> SessionEntry:
        """The session in the path, for its tenant alone: the agent that is graded has the session's token. Raises
        ApiError (401, 404).
        """
        name: str = request.path_params["session_id"]
        if not self.keys.required:
            return await self._get(name)
        self.tenant_of(request)
        entry = await self._owned(self.keys.tenants_of(keys_of(request)), name)
        if entry is None:
            raise no_session(name)
        return entry

    async def newest(self, session_id: str) -> SessionEntry | None:
        """The entry under its recorded id, with all that other replicas have written by now: for what must not be
        written twice.
        """
        await self.catch_up()
        return self.table.get(session_id)

    async def catch_up(self) -> None:
        """Read what other replicas have written by now, for ``lookup_seconds`` at most."""
        await self.table.catch_up(self.position, self.lookup_seconds)

    def tenant_of(self, request: Request) -> str | None:
        """The tenant of a request's keys; None where keys are not required. Raises ApiError (401)."""
        tenants = self.keys.tenants_of(keys_of(request))
        if not tenants and self.keys.required:
            raise ApiError(
                401,
                "a tenant's key is needed: send it as `Authorization: Bearer …`; a session's own api_key makes its "
                "calls and lists models",
            )
        return tenants[0] if tenants else None

    def require_admin(self, request: Request) -> None:
        """Raises ApiError (403) for everybody but the administrator."""
        if not any(self.keys.is_admin(key) for key in (None, *keys_of(request))):
            raise ApiError(403, "the administrator's key is needed (its digest is ROLLMILL_ADMIN_KEY_SHA256)")

    def recorded_id(self, tenant: Tenant, name: str) -> str:
        """The id under which a tenant's session is recorded."""
        return self.names.recorded(tenant, name, self.table.owners)

    def own_entry(self, tenant: Tenant, session_id: str, name: str) -> SessionEntry | None:
        """The entry under a recorded id; None: it is free. Raises ApiError (404) where it is another tenant's."""
        entry = self.table.get(session_id)
        if entry is not None and self.keys.required and entry.tenant != tenant:
            raise no_session(name)
        return entry

    def recorded_spec(self, tenant: Tenant, spec: SessionSpec) -> SessionSpec:
        """The spec as it is recorded: two tenants' groups of one name are two. Raises InvalidInputError."""
        if spec.group_id is None:
            return spec
        group_id = self.names.recorded(tenant, spec.group_id, self.table.group_owners)
        require_name(group_id, "group_id")
        return spec if group_id == spec.group_id else spec.replace(group_id=group_id)

    def sent_spec(self, entry: SessionEntry) -> SessionSpec:
        """The spec with the group as the tenant named it."""
        spec = entry.spec
        if spec.group_id is None or not self.keys.required:
            return spec
        return spec.replace(group_id=self.names.sent(entry.tenant, spec.group_id))

    def name_of(self, entry: SessionEntry) -> str:
        """The session's id as its tenant knows it."""
        return self.names.sent(entry.tenant, entry.session_id) if self.keys.required else entry.session_id

    async def _access(self, presented: Presented, name: str) -> Access:
        """Unknown keys are refused before the name is looked at, so that they learn nothing of it."""
        if not self.keys.required:
            return Access(await self._get(name), by_tenant=True)
        tenants = self.keys.tenants_of(presented)
        found = self._accessible(presented, tenants, name)
        if found is None and presented:
            await self.catch_up()
            found = self._accessible(presented, tenants, name)
        if found is not None:
            return found
        raise no_session(name) if tenants else ApiError(401, UNKNOWN_KEY)

    def _accessible(self, presented: Presented, tenants: Iterable[str], name: str) -> Access | None:
        owned = self._known(tenants, name)
        if owned is not None:
            return Access(owned, by_tenant=True)
        tokens = (self.table.of_token(digest_of(key)) for key in presented)
        named = (entry for entry in tokens if entry is not None and name in (entry.session_id, self.name_of(entry)))
        entry = next(named, None)
        return None if entry is None else Access(entry, by_tenant=False)

    async def _owned(self, tenants: Iterable[str], name: str) -> SessionEntry | None:
        """The session that one of the tenants has by this name, waited for if unknown (rule S3)."""
        entry = self._known(tenants, name)
        if entry is None:
            await self.catch_up()
            entry = self._known(tenants, name)
        return entry

    def _known(self, tenants: Iterable[str], name: str) -> SessionEntry | None:
        for tenant in tenants if is_identifier(name) else ():
            entry = self.table.get(self.recorded_id(tenant, name))
            if entry is not None and entry.tenant == tenant:
                return entry
        return None

    async def _get(self, session_id: str) -> SessionEntry:
        """Where no keys are required: the session, waited for if unknown (rule S3). Raises ApiError (404)."""
        found = is_identifier(session_id)
        entry = await self.table.find(session_id, self.position, self.lookup_seconds) if found else None
        if entry is None:
            raise no_session(session_id)
        return entry

    async def _session_of_keys(self, presented: Presented, in_header: str | None) -> SessionEntry:
        """A session's token names it, whatever the header says: harnesses have session ids of their own."""
        entry = self._of_token(presented)
        tenants = self.keys.tenants_of(presented)
        if entry is None and tenants and in_header:
            entry = await self._owned(tenants, in_header)
            if entry is None:
                raise no_session(in_header)
        if entry is None and presented and not tenants:
            await self.catch_up()
            entry = self._of_token(presented)
        if entry is not None:
            return entry
        if presented:
            raise ApiError(401, "the API key is no session's; use the api_key that opening a session returned")
        raise _unnamed()

    async def _session_without_keys(self, presented: Presented, in_header: str | None) -> SessionEntry:
        """By a token, else by the header, else by an id in place of a key."""
        if not presented and not in_header:
            raise _unnamed()
        entry = self._of_anything(presented, in_header)
        if entry is None:
            await self.catch_up()
            entry = self._of_anything(presented, in_header)
        if entry is None:
            raise no_session(in_header)
        return entry

    def _of_token(self, presented: Presented) -> SessionEntry | None:
        found = (self.table.of_token(digest_of(key)) for key in presented)
        return next((entry for entry in found if entry is not None), None)

    def _of_anything(self, presented: Presented, in_header: str | None) -> SessionEntry | None:
        by_id = (self.table.get(name) for name in (in_header or "", *presented))
        return self._of_token(presented) or next((entry for entry in by_id if entry is not None), None)


def no_session(name: str | None) -> ApiError:
    """Of a session that does not exist, and of one that is another tenant's. A key is never part of it."""
    which = "of this name or API key" if name is None or name.startswith(TOKEN_START) else repr(name)
    return ApiError(
        404,
        f"there is no session {which}: open one with POST /v1/sessions and use its base_url, or send its id in the "
        f"header {SESSION_HEADER} or its api_key as the API key",
    )


def require_name(recorded: str, field_name: str) -> None:
    """Raises InvalidInputError where a name is too long to be recorded with its tenant's prefix."""
    if not is_identifier(recorded):
        raise InvalidInputError(f"{field_name}: at most {128 - PREFIX_LENGTH} characters, where tenants share capture")


def _unnamed() -> ApiError:
    return ApiError(
        401,
        f"the session of this call is not named: use a session's base_url, the header {SESSION_HEADER}, or its "
        "api_key as the API key",
    )
