"""How a model is configured: where its calls go, which engine answers them, and how its versions are known."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, SecretStr

from rollmill.models import CallKind, Identifier, PolicyVersion


class EngineKind(StrEnum):
    """``auto``: found out by a probe; until then, and where the probe finds nothing, asked as vLLM is."""

    AUTO = "auto"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama_cpp"
    OPENAI = "openai"


class VersionSource(StrEnum):
    """``engine``: the reply names it (where it does not, as announced); ``announced``: the topic ``policies``, before
    and after the call; ``fixed``: one version for ever, for models that are not being trained.
    """

    ENGINE = "engine"
    ANNOUNCED = "announced"
    FIXED = "fixed"


HTTP = "http://"
URL_SCHEMES = (HTTP, "https://")


def with_scheme(url: str) -> str:
    """The URL; without a scheme (``127.0.0.1:8000``) it is one of HTTP."""
    return url if "://" in url else HTTP + url


def _checked_url(url: str) -> str:
    host = urlsplit(with_scheme(url)).hostname if with_scheme(url).startswith(URL_SCHEMES) else None
    if not host:
        raise ValueError(f"{url!r} is not the URL of an upstream; give one like http://127.0.0.1:8000")
    return url


UpstreamUrl = Annotated[str, AfterValidator(_checked_url)]
"""Base URL of an engine, with or without ``/v1``."""

NativeApi = Literal["responses", "messages"]


class Route(BaseModel):
    """Where calls for one model name go, and what they count as (rule A8)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: UpstreamUrl | None = None
    """Base URL without ``/v1``; None: the setting ``upstream``."""
    replicas: tuple[UpstreamUrl, ...] = ()
    """Base URLs of further engines with the same model; a session stays with one of them as long as it is healthy."""
    model: str | None = None
    """The upstream's own name of the model; None: the client's."""
    policy: Identifier = "policy"
    version_source: VersionSource = VersionSource.ENGINE
    version: PolicyVersion = PolicyVersion()
    """For ``fixed``."""
    trainable: bool = True
    kind: CallKind = CallKind.AGENT
    """Of calls without the header ``x-rollmill-call``: ``aux`` for a model that judges or makes titles."""
    api_key: SecretStr | None = None
    """Bearer token for the upstream; None: the setting ``upstream_api_key``."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Whether the engine's log-probs are taken before or after temperature and filters; None: unknown."""
    engine: EngineKind = EngineKind.AUTO
    """What the upstream is; ``auto``: a probe finds out."""
    native: tuple[NativeApi, ...] = ()
    """APIs that the upstream has itself: their calls are passed on to it as they are; such replies have no ids and
    are not trained. Calls of other APIs are translated to chat completions."""
    defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields for requests that lack them, e.g. ``temperature``: an engine's own defaults are in no record."""
    cache_salt: bool = False
    """Send the policy's version as `cache_salt` (vLLM), so that no call reads keys and values that older weights have
    computed, at the price of a cold prefix cache after each update."""
    fingerprint: str | None = None
    """Digest of tokenizer, chat template and model, where the operator knows it (rule A10)."""
