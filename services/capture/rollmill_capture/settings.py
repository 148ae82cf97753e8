"""Settings of capture, from ``ROLLMILL_*`` environment variables; the reason stands under each field."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SecretStr, model_validator

from rollmill.models import Identifier, PolicyVersion
from rollmill.settings import ServiceSettings


class VersionSource(StrEnum):
    """``engine``: the reply says it (where it does not, as announced); ``announced``: the topic ``policies``, before
    and after the call; ``fixed``: one version for ever, for models that are not being trained.
    """

    ENGINE = "engine"
    ANNOUNCED = "announced"
    FIXED = "fixed"


class Route(BaseModel):
    """Where calls for one model name go, and what they count as (RULES A8)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: str | None = None
    """Base URL without ``/v1``; None: the setting ``upstream``."""
    model: str | None = None
    """The upstream's own name of the model; None: as the client says."""
    policy: Identifier = "policy"
    version_source: VersionSource = VersionSource.ENGINE
    version: PolicyVersion = PolicyVersion()
    """For ``fixed``."""
    trainable: bool = True
    api_key: SecretStr | None = None
    """Bearer token for the upstream; None: the setting ``upstream_api_key``."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Whether the engine's log-probs are taken before or after temperature and filters; None: unknown."""
    fingerprint: str | None = None
    """Digest of tokenizer, chat template and model, where the operator knows it (RULES A10)."""


class CaptureSettings(ServiceSettings):
    host: str = "127.0.0.1"
    port: PositiveInt = 8700
    public_url: str | None = None
    """What agents reach capture by; None: from ``host`` and ``port``."""
    upstream: str = "http://127.0.0.1:8000"
    """Base URL of the engine, with or without ``/v1``."""
    upstream_api_key: SecretStr | None = None
    default_route: Route = Route()
    """For every model name that ``routes`` does not list."""
    routes: dict[str, Route] = Field(default_factory=dict)
    """Model name, as the client says it, to its route."""
    connect_seconds: float = Field(default=30.0, gt=0)
    """Engines under load are slow to accept."""
    read_seconds: float = Field(default=900.0, gt=0)
    """Longest silence of an engine: a long prompt in a full queue says nothing for minutes."""
    connections: PositiveInt = 4096
    """To upstreams, at once; a waiting rollout holds one."""
    request_bytes: PositiveInt = 64 * 2**20
    """Largest request body."""
    ack_seconds: float = Field(default=15.0, gt=0)
    """For Kafka's acknowledgement of a record where there is no spool; then the client gets an error instead of the
    end of its reply."""
    spool_dir: Path | None = None
    """A directory on a persistent volume for records that Kafka does not take now (RULES S5). None: no spool, and
    while Kafka is away calls are refused with 503."""
    spool_bytes: PositiveInt = 4 * 2**30
    """Of spooled records and of room kept for calls in flight; a call without a limit on its tokens keeps 8 MiB."""
    spool_after_seconds: float = Field(default=3.0, gt=0)
    """For Kafka's acknowledgement of a record; then it goes into the spool."""
    pause_seconds: float = Field(default=900.0, gt=0)
    """Longest wait of a call for the end of a weight update; then it is refused with 503."""
    close_seconds: float = Field(default=30.0, gt=0)
    """How long closing a session waits for its calls in flight."""
    lookup_seconds: float = Field(default=1.0, gt=0)
    """How long an unknown session is looked for before 404 (RULES S3)."""

    @property
    def public(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return (self.public_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def policies(self) -> frozenset[str]:
        """The policies that calls can be trained for."""
        return frozenset(route.policy for route in (self.default_route, *self.routes.values()) if route.trainable)

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if len(self.policies) > 1:
            raise ValueError(
                f"routes train {len(self.policies)} policies ({', '.join(sorted(self.policies))}), and one run trains "
                "one; set `trainable` to false on the others, or start a second run with a prefix of its own"
            )
        return self
