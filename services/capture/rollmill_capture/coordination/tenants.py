"""Tenants: under which names their sessions and groups are recorded, and how much one of them may have at once. Pure.

A name that a tenant chooses is its own: two tenants with the same session id or group id have two sessions and two
groups, and nothing tells one that the other's exists (rule S6). Behind capture there is one name space, so the names of
all tenants but one are recorded with a prefix that only their tenant's names have.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmill.errors import BackpressureError
from rollmill.models import SessionEntry, SessionSpec, SessionState

_PREFIXED = re.compile(r"t-[0-9a-f]{16}\.")
PREFIX_LENGTH = 19
RETRY_SECONDS = 5.0

Tenant = str | None
"""None: everybody, where no keys are required."""


def prefix(tenant: str) -> str:
    """What the recorded names of a tenant begin with, where they are not recorded as they were sent."""
    return f"t-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}."


class TenantNames:
    """``unprefixed``: the tenant that has its names recorded as it sends them; None: the only one, else none."""

    def __init__(self, tenants: Iterable[str] = (), unprefixed: str | None = None) -> None:
        known = tuple(tenants)
        self._unprefixed = known[0] if unprefixed is None and len(known) == 1 else unprefixed

    def recorded(self, tenant: Tenant, name: str, owners: Callable[[str], Collection[Tenant]]) -> str:
        """The name under which a tenant's ``name`` is recorded. ``owners``: the tenants that have a recorded name now.

        What the tenant has already keeps its name, whatever the settings and the release were when it got that.
        """
        if tenant is None:
            return name
        prefixed = prefix(tenant) + name
        for candidate in (name, prefixed):
            if set(owners(candidate)) == {tenant}:
                return candidate
        free = tenant == self._unprefixed and not _PREFIXED.match(name) and not owners(name)
        return name if free else prefixed

    def sent(self, tenant: Tenant, recorded: str) -> str:
        """The name as the tenant knows it."""
        return recorded if tenant is None else recorded.removeprefix(prefix(tenant))


class QuotaExceededError(BackpressureError):
    """A tenant has as much as it may have at once; the message names what."""


@dataclass(frozen=True)
class TenantQuotas:
    """Of each tenant; None: no limit."""

    open_sessions: int | None = None
    spec_bytes: int | None = None
    calls: int | None = None


class TenantUsage:
    """What each tenant has, by the entries of the session table."""

    def __init__(self) -> None:
        self._open: dict[Tenant, dict[str, float]] = {}
        """Session id to its deadline."""
        self._spec_bytes: Counter[Tenant] = Counter()

    def add(self, entry: SessionEntry) -> None:
        self._spec_bytes[entry.tenant] += spec_bytes(entry.spec)
        if entry.state is SessionState.OPEN:
            deadline = entry.opened_at + entry.spec.deadline_seconds
            self._open.setdefault(entry.tenant, {})[entry.session_id] = deadline

    def remove(self, entry: SessionEntry) -> None:
        self._spec_bytes[entry.tenant] -= spec_bytes(entry.spec)
        self._open.get(entry.tenant, {}).pop(entry.session_id, None)

    def open_sessions(self, tenant: Tenant, now: float) -> int:
        """Those that are neither closed nor past their deadline, at which the builder closes them."""
        alive = {name: deadline for name, deadline in self._open.get(tenant, {}).items() if deadline > now}
        self._open[tenant] = alive
        return len(alive)

    def spec_bytes(self, tenant: Tenant) -> int:
        """Of all sessions that are known: every replica holds them. Of closed ones little is left."""
        return self._spec_bytes[tenant]


@dataclass
class QuotaGuard:
    """Refuses what a tenant has no quota for. ``usage``: of all replicas; calls are counted at this one."""

    quotas: TenantQuotas = TenantQuotas()
    usage: TenantUsage = field(default_factory=TenantUsage)
    _opening: Counter[Tenant] = field(default_factory=Counter)
    """Openings that are not in the table yet, and the bytes of their specs."""
    _opening_bytes: Counter[Tenant] = field(default_factory=Counter)
    _calls: Counter[Tenant] = field(default_factory=Counter)

    @contextmanager
    def opening(
        self, tenant: Tenant, spec: SessionSpec, now: float, replaced: SessionEntry | None = None
    ) -> Iterator[None]:
        """Inside, a session opens, in place of ``replaced``, an earlier attempt. Raises QuotaExceededError."""
        if self.quotas.open_sessions is None and self.quotas.spec_bytes is None:
            yield
            return
        size, known = spec_bytes(spec), self.usage
        before = 0 if replaced is None else spec_bytes(replaced.spec)
        freed = replaced is not None and replaced.state is SessionState.OPEN
        sessions = known.open_sessions(tenant, now) + self._opening[tenant] - freed
        _refuse_beyond(self.quotas.open_sessions, sessions + 1, "open sessions (ROLLMILL_TENANT_OPEN_SESSIONS)")
        total = known.spec_bytes(tenant) + self._opening_bytes[tenant] + size - before
        _refuse_beyond(self.quotas.spec_bytes, total, "bytes of sessions' specs (ROLLMILL_TENANT_SPEC_BYTES)")
        self._opening[tenant] += 1
        self._opening_bytes[tenant] += size
        try:
            yield
        finally:
            self._opening[tenant] -= 1
            self._opening_bytes[tenant] -= size

    @contextmanager
    def call(self, tenant: Tenant) -> Iterator[None]:
        """Inside, one call more of the tenant is in flight. Raises QuotaExceededError."""
        _refuse_beyond(self.quotas.calls, self._calls[tenant] + 1, "calls in flight (ROLLMILL_TENANT_CALLS)")
        self._calls[tenant] += 1
        try:
            yield
        finally:
            self._calls[tenant] -= 1


def spec_bytes(spec: SessionSpec) -> int:
    """Size of a spec as it is recorded."""
    return len(spec.model_dump_json())


def _refuse_beyond(limit: int | None, wanted: int, what: str) -> None:
    if limit is not None and wanted > limit:
        raise QuotaExceededError(f"the tenant's quota is exhausted: {limit} {what}", retry_after=RETRY_SECONDS)
