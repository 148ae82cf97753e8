"""Keys of tenants and of the administrator, and the tokens of sessions.

Settings hold digests of keys, never keys, and every comparison takes the same time whatever it compares.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping

from rollmill.errors import ConfigurationError
from rollmill.models import SessionEntry
from rollmill_capture.settings import CaptureSettings

TOKEN_START = "rm-"  # noqa: S105  # only the beginning, so that people recognise one


def digest_of(key: str) -> str:
    """SHA-256 (hex) of a key. Keys are long and random, so that nothing slower is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_token() -> str:
    """A session's API key: 192 random bits."""
    return TOKEN_START + secrets.token_urlsafe(24)


def is_token_of(key: str | None, digest: str | None) -> bool:
    """Whether ``key`` is the token with this digest; None: there is none."""
    return key is not None and digest is not None and hmac.compare_digest(digest_of(key), digest)


class Keys:
    """The keys that are accepted, by their digests."""

    def __init__(self, tenants: Mapping[str, str], admin: str | None) -> None:
        self._tenants = {tenant: digest.lower() for tenant, digest in tenants.items()}
        self._admin = None if admin is None else admin.lower()
        self.required = bool(self._tenants)
        """Whether calls need a key at all."""

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(self._tenants)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant with this key; None: no tenant has it."""
        digest = digest_of(key or "")
        matches = [tenant for tenant, known in self._tenants.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def tenants_of(self, presented: Iterable[str]) -> tuple[str, ...]:
        """The tenants with one of these keys, each once."""
        found = (self.tenant_of(key) for key in presented)
        return tuple(dict.fromkeys(tenant for tenant in found if tenant is not None))

    def is_admin(self, key: str | None) -> bool:
        """Whether the key may steer capture. Where no keys are required, everybody may."""
        if self._admin is None:
            return not self.required
        return hmac.compare_digest(digest_of(key or ""), self._admin)


NO_KEYS = Keys({}, None)


def accepted_keys(settings: CaptureSettings) -> Keys:
    """The keys that the settings name. Raises ConfigurationError: the file of keys cannot be read, or names none."""
    digests = settings.key_digests
    if settings.api_keys_file is not None and not digests:
        raise ConfigurationError(
            f"ROLLMILL_API_KEYS_FILE {settings.api_keys_file} names no tenant: all would be let in"
        )
    return Keys(digests, settings.admin_key_sha256)


class SessionTokens:
    """The tokens of the sessions that were opened here last; only their digests are written down."""

    def __init__(self, max_tokens: int = 100_000) -> None:
        self._tokens: dict[str, str] = {}
        self._max_tokens = max_tokens

    def new(self, session_id: str) -> str:
        """A new token for a session; returns its digest."""
        token = new_token()
        self._tokens.pop(session_id, None)
        self._tokens[session_id] = token
        if len(self._tokens) > self._max_tokens:
            del self._tokens[next(iter(self._tokens))]
        return digest_of(token)

    def of(self, entry: SessionEntry) -> str | None:
        """The session's token, where it is still valid; None: unknown here."""
        token = self._tokens.get(entry.session_id)
        return token if is_token_of(token, entry.token) else None
