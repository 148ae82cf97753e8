"""Who may call: bearer keys of tenants and of the administrator, and the tokens of sessions. Pure.

Settings hold digests, never keys, and every comparison takes the same time whatever it compares.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

TENANT = "tenant"
"""Field of a session's metadata: whose key opened it. Not for clients to set where keys are asked for."""

_BEARER = "bearer "
_TOKEN = "rm-"  # noqa: S105  # only the beginning, so that people recognise one
_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")
"""Where the SDKs of other APIs put the key."""


def digest_of(key: str) -> str:
    """SHA-256 (hex) of a key. Keys are long and random, so that nothing slower is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_token() -> str:
    """A session's API key: 192 random bits."""
    return _TOKEN + secrets.token_urlsafe(24)


def presented_key(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The key that a request carries, wherever its SDK puts it; header names in lower case."""
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(_BEARER):
        return authorization[len(_BEARER) :].strip() or None
    found = (headers.get(name) for name in _HEADERS)
    return next((key for key in found if key), None) or query.get("key") or None


class Keys:
    """The keys that are accepted, by their digests."""

    def __init__(self, tenants: Mapping[str, str], admin: str | None) -> None:
        self._tenants = {tenant: digest.lower() for tenant, digest in tenants.items()}
        self._admin = None if admin is None else admin.lower()

    @property
    def asked_for(self) -> bool:
        """Whether calls need a key at all."""
        return bool(self._tenants)

    def tenant(self, key: str | None) -> str | None:
        """Whose key this is; None: nobody's."""
        digest = digest_of(key or "")
        matches = [tenant for tenant, known in self._tenants.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def is_admin(self, key: str | None) -> bool:
        """Whether the key may steer capture. Where no keys are asked for, everybody may."""
        if self._admin is None:
            return not self.asked_for
        return hmac.compare_digest(digest_of(key or ""), self._admin)


def is_token_of(key: str | None, digest: str | None) -> bool:
    """Whether ``key`` is the token with this digest; None: there is none."""
    return key is not None and digest is not None and hmac.compare_digest(digest_of(key), digest)
