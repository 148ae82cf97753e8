"""Settings of capture, from ``ROLLMILL_*`` environment variables; each field has its reason below it."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, PositiveInt, SecretStr, TypeAdapter, field_validator, model_validator

from rollmill.errors import ConfigurationError
from rollmill.models import LARGEST_REWARD
from rollmill.settings import ServiceSettings
from rollmill_capture.admission import AdmissionLimits
from rollmill_capture.model_config import Route, UpstreamUrl, with_scheme

DIGEST = r"^[0-9a-fA-F]{64}$"


class CaptureSettings(ServiceSettings):
    section: ClassVar[str] = "capture"

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: PositiveInt = 8700
    """Port to listen on."""
    api_keys: dict[str, str] = Field(default_factory=dict)
    """Tenant to the SHA-256 (hex) of its key, as JSON; needed wherever others than this machine can connect."""
    api_keys_file: Path | None = None
    """The same as a file of JSON, read at start; its tenants win."""
    admin_key_sha256: str | None = Field(default=None, pattern=DIGEST)
    """SHA-256 (hex) of the key for ``/admin``; None: where keys are required, ``/admin`` is closed."""
    unprefixed_tenant: str | None = None
    """The tenant that has its session and group ids recorded as it sends them; those of the others get a prefix, so
    that no two tenants share one (rule S6). None: the only tenant, and with several none of them."""
    token_may_close: bool = True
    """Whether a session's own key closes it, without a reward and an output. Agents have that key; harnesses that are
    not given the tenant's close with it."""
    max_reward: float = Field(default=1e6, gt=0, le=LARGEST_REWARD)
    """Largest magnitude of a reward; beyond it 422: one out of all proportion decides the advantages of a group."""
    session_rewards: PositiveInt | None = None
    """Rewards of one attempt of a session, counted at each replica. None: 256, as many as the reward-merger takes."""
    tenant_open_sessions: PositiveInt | None = None
    """Open sessions of one tenant; one more is answered with 429. None: no limit."""
    tenant_spec_bytes: PositiveInt | None = None
    """Bytes of the specs of one tenant's open sessions: every replica holds them in memory. None: no limit."""
    tenant_calls: PositiveInt | None = None
    """Calls in flight of one tenant at each replica. None: no limit."""
    public_url: str | None = None
    """What agents reach capture by; None: from ``host`` and ``port``."""
    upstream: UpstreamUrl = "http://127.0.0.1:8000"
    """Base URL of the engine, with or without ``/v1``."""
    upstream_api_key: SecretStr | None = None
    """The engine's own key, sent with every call. None: the engine asks for none."""
    default_route: Route = Route()
    """For every model name that ``routes`` does not list."""
    routes: dict[str, Route] = Field(default_factory=dict)
    """Model name, as clients send it, to its route."""
    connect_seconds: float = Field(default=30.0, gt=0)
    """Engines under load are slow to accept."""
    read_seconds: float = Field(default=900.0, gt=0)
    """Longest silence of an engine: a long prompt in a full queue is silent for minutes."""
    backoff_seconds: float = Field(default=30.0, gt=0)
    """Longest rest that a busy upstream (429, 503) is given; calls wait for its end, where there is no other one."""
    connections: PositiveInt = 4096
    """To upstreams, at once; a waiting rollout holds one."""
    request_bytes: PositiveInt = 64 * 2**20
    """Largest request body, decoded."""
    reply_bytes: PositiveInt = 64 * 2**20
    """Largest whole reply of an upstream, decoded; a larger one is an error for the client, and recorded as failed."""
    header_seconds: float = Field(default=20.0, gt=0)
    """For the first line and the headers of a request, from its connection's or its own first byte on."""
    body_seconds: float = Field(default=120.0, gt=0)
    """For the body of a request."""
    ack_seconds: float = Field(default=15.0, gt=0)
    """For Kafka's acknowledgement of a record where there is no spool; then the client gets an error instead of the
    end of its reply."""
    spool_dir: Path | None = None
    """A directory on a persistent volume for records that Kafka does not take now (rule S5). None: no spool, and
    while Kafka is away calls are refused with 503."""
    spool_bytes: PositiveInt = 32 * 2**30
    """Of spooled records and of room kept for calls in flight, never more than the disk has free. Room is kept while
    Kafka is well, too, so this bounds the calls at once: one without a limit on its tokens keeps 8 MiB."""
    spool_after_seconds: float = Field(default=3.0, gt=0)
    """For Kafka's acknowledgement of a record; then it goes into the spool."""
    pause_seconds: float = Field(default=900.0, gt=0)
    """Longest wait of a call for the end of a weight update; then it is refused with 503."""
    close_seconds: float = Field(default=30.0, gt=0)
    """How long closing a session waits for its calls in flight."""
    keep_alive_seconds: float = Field(default=15.0, gt=0)
    """A client that waits for a stream gets something that often, while the engine is silent."""
    probe: bool = True
    """Find out at the start what the upstreams can, by their list of models and one sampled token."""
    admission: dict[str, AdmissionLimits] = Field(default_factory=dict)
    """Policy to its limits, as JSON; a policy that is not here is not limited."""
    replay_seconds: float = Field(default=600.0, gt=0)
    """How long a reply is kept for a client that sends its `idempotency-key` again."""
    replay_bytes: PositiveInt = 256 * 2**20
    """Of all replies that are kept for that."""
    session_retention_seconds: float = Field(default=24 * 3600.0, gt=0)
    """How long a session that is over stays known: closing it again, or calling it, is answered with 409 until then,
    and with 404 afterwards. Longer than ``late_window_seconds``, or its id could be opened anew too early."""
    late_window_seconds: float = Field(default=6 * 3600.0, gt=0)
    """The builder's setting of that name: how long it knows a closed session."""
    lookup_seconds: float = Field(default=1.0, gt=0)
    """How long an unknown session is looked for before 404 (rule S3)."""

    @property
    def key_digests(self) -> dict[str, str]:
        """Tenant to the digest of its key, those of the file too. Raises ConfigurationError: it cannot be read."""
        return {**self.api_keys, **_read_keys(self.api_keys_file)}

    @property
    def public(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return (self.public_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def upstreams_without_scheme(self) -> list[str]:
        """Upstreams of which http:// is assumed."""
        routes = (self.default_route, *self.routes.values())
        given = [self.upstream, *(url for route in routes for url in (route.upstream or "", *route.replicas))]
        return [url for url in dict.fromkeys(given) if url and url != with_scheme(url)]

    @property
    def policies(self) -> frozenset[str]:
        """The policies that calls can be trained for."""
        return frozenset(route.policy for route in (self.default_route, *self.routes.values()) if route.trainable)

    @field_validator("api_keys")
    @classmethod
    def _digests(cls, keys: dict[str, str]) -> dict[str, str]:
        return _checked_keys(keys)

    @model_validator(mode="after")
    def _keys_outside(self) -> Self:
        if not (self.api_keys or self.api_keys_file) and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached by other machines, so keys are needed: set ROLLMILL_API_KEYS to "
                """'{"tenant": "SHA-256 of its key"}' (`printf %s "$KEY" | sha256sum`), or bind 127.0.0.1"""
            )
        return self

    @model_validator(mode="after")
    def _unprefixed_is_known(self) -> Self:
        if self.unprefixed_tenant is None or self.unprefixed_tenant in self.key_digests:
            return self
        raise ValueError(
            f"unprefixed_tenant {self.unprefixed_tenant!r} has no key; those with one: {sorted(self.key_digests)}"
        )

    @model_validator(mode="after")
    def _known_for_long_enough(self) -> Self:
        if self.session_retention_seconds <= self.late_window_seconds:
            raise ValueError(
                f"session_retention_seconds {self.session_retention_seconds:g} must be above late_window_seconds "
                f"{self.late_window_seconds:g}: the builder still knows a session that capture would open anew"
            )
        return self

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if len(self.policies) > 1:
            raise ValueError(
                f"routes train {len(self.policies)} policies ({', '.join(sorted(self.policies))}), and one run trains "
                "one; set `trainable` to false on the others, or start a second run with a prefix of its own"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_keys(path: Path | None) -> dict[str, str]:
    try:
        return {} if path is None else _checked_keys(TypeAdapter(dict[str, str]).validate_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"ROLLMILL_API_KEYS_FILE {path} cannot be used: {error}") from error


def _checked_keys(keys: dict[str, str]) -> dict[str, str]:
    bad = [tenant for tenant, digest in keys.items() if not re.fullmatch(DIGEST, digest)]
    if bad:
        raise ValueError(f"the key of tenant {bad[0]!r} must be given by its SHA-256, as 64 hexadecimal digits")
    return keys
