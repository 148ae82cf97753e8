"""The HTTP application: its parts, and which path is which API.

By base URL the session is in the path; else it comes as header or API key. SDKs differ in what they put behind a base
URL (``/v1/messages``, ``/v1beta/models/…``, ``/chat/completions``), so every API has paths behind the session's address
with and without its ``/v1``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from rollmill.models import SessionSpec
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import validate_session_spec
from rollmill_capture.admission import Admission
from rollmill_capture.apis import anthropic_reply, openai_responses_reply
from rollmill_capture.apis.anthropic_reply import AnthropicApi
from rollmill_capture.apis.api import ApiAdapter
from rollmill_capture.apis.gemini_reply import GeminiApi
from rollmill_capture.apis.history_cache import HistoryCache
from rollmill_capture.apis.native import NativePassthroughApi, SglangGenerateApi, VllmGenerateApi
from rollmill_capture.apis.openai import ChatApi, CompletionsApi
from rollmill_capture.apis.openai_responses_reply import OpenAiResponsesApi
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.policies import AnnouncedVersions, PolicyPauses
from rollmill_capture.coordination.session_table import Position, SessionTable
from rollmill_capture.coordination.tenants import QuotaGuard, TenantNames, TenantQuotas
from rollmill_capture.errors import ApiError
from rollmill_capture.event_log.event_writer import EventWriter
from rollmill_capture.http.admin import AdminApi
from rollmill_capture.http.error_replies import reply_api_error, reply_http_error
from rollmill_capture.http.idempotency import Idempotency
from rollmill_capture.http.keys import accepted_keys
from rollmill_capture.http.model_calls import CallContext, CallEndpoint
from rollmill_capture.http.models import ModelsApi
from rollmill_capture.http.reference.endpoints import reference_routes
from rollmill_capture.http.requests import SessionResolver
from rollmill_capture.http.rewards import RewardApi
from rollmill_capture.http.sessions import SessionApi
from rollmill_capture.proxy.recorder import Recorder
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import RouteTable, Upstream
from rollmill_capture.upstream.formats.upstream_format import ANTHROPIC_MESSAGES, OPENAI_RESPONSES

Lookup = Callable[[Request], Awaitable[Response]]

SESSION = "/sessions/{session_id}"
GEMINI_VERSIONS = ("v1beta", "v1", "v1alpha")
BASES = (SESSION, "", f"{SESSION}/v1")


@dataclass(frozen=True)
class CaptureParts:
    """What the HTTP application is made of; tests put fakes in place of the outside world."""

    settings: CaptureSettings
    sessions: SessionTable
    position: Position
    announced: AnnouncedVersions
    event_writer: EventWriter
    upstream: Upstream
    clock: Clock
    metrics: Metrics
    validate: Callable[[SessionSpec], None] | None = None
    """None: by the registries, and within the operator's maxima."""
    engines: EngineCapabilities = field(default_factory=EngineCapabilities)
    admission: Admission | None = None
    """None: everything is admitted."""
    claims: ClaimCheck | None = None
    """None: every record is in the log itself."""
    membership: Membership | None = None
    """None: this replica is the only one."""


def assemble(parts: CaptureParts) -> Starlette:
    """The HTTP application."""
    settings, routes = parts.settings, RouteTable(parts.settings)
    keys = accepted_keys(settings)
    names = TenantNames(keys.tenants, settings.unprefixed_tenant)
    resolver = SessionResolver(parts.sessions, parts.position, settings.lookup_seconds, keys, names)
    quotas = _quotas(settings, parts.sessions, required=keys.required)
    admission = parts.admission or Admission({}, parts.announced.newest)
    sessions = SessionApi(
        resolver=resolver,
        event_writer=parts.event_writer,
        clock=parts.clock,
        metrics=parts.metrics,
        public_url=settings.public,
        policies=settings.policies,
        close_seconds=settings.close_seconds,
        admission=admission,
        validate=parts.validate or partial(validate_session_spec, maxima=settings.spec_maxima),
        quotas=quotas,
        max_reward=settings.max_reward,
        token_may_close=settings.token_may_close,
    )
    membership = parts.membership or Membership(
        PolicyPauses(parts.upstream.pauses, parts.announced), parts.event_writer, parts.clock
    )
    admin = AdminApi(resolver, membership.pauses, membership, parts.event_writer)
    recorder = Recorder(parts.event_writer, parts.announced, parts.clock, parts.metrics, parts.engines, parts.claims)
    call_context = CallContext(
        resolver=resolver,
        routes=routes,
        upstream=parts.upstream,
        recorder=recorder,
        engines=parts.engines,
        history=HistoryCache(),
        request_bytes=settings.request_bytes,
        keep_alive_seconds=settings.keep_alive_seconds,
        quotas=quotas,
    )
    idempotency = Idempotency(parts.metrics, seconds=settings.replay_seconds, max_bytes=settings.replay_bytes)
    rewards = RewardApi(
        resolver, parts.event_writer, parts.clock, parts.metrics, settings.max_reward, settings.session_rewards
    )
    app = Starlette(
        routes=[
            *_call_routes(call_context, idempotency),
            *_lookup_routes(ModelsApi(call_context)),
            Route("/v1/sessions", sessions.open, methods=["POST"]),
            Route("/v1/sessions/{session_id}", sessions.show),
            Route("/v1/sessions/{session_id}/close", sessions.close, methods=["POST"]),
            Route("/v1/sessions/{session_id}/reward", rewards.reward, methods=["POST"]),
            Route("/admin/policies/{policy}/pause", admin.pause, methods=["POST"]),
            Route("/admin/policies/{policy}/resume", admin.resume, methods=["POST"]),
            Route("/admin/policies/{policy}/status", admin.status),
            *reference_routes(),
        ],
        exception_handlers={ApiError: reply_api_error, HTTPException: reply_http_error},
    )
    app.router.redirect_slashes, app.router.default = False, WithoutEmptySegments(app.router)
    return app


@dataclass(frozen=True)
class WithoutEmptySegments:
    """What no route matches is tried again without empty segments: of a base URL with a slash at its end."""

    router: Router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = "/" + "/".join(segment for segment in scope["path"].split("/") if segment)
        if path == scope["path"]:
            await self.router.not_found(scope, receive, send)
        else:
            await self.router({**scope, "path": path}, receive, send)


def _quotas(settings: CaptureSettings, sessions: SessionTable, *, required: bool) -> QuotaGuard | None:
    """Quotas are of tenants: without keys there is none."""
    quotas = TenantQuotas(settings.tenant_open_sessions, settings.tenant_spec_bytes, settings.tenant_calls)
    if not required or quotas == TenantQuotas():
        return None
    return QuotaGuard(quotas, sessions.measure())


def _call_routes(context: CallContext, idempotency: Idempotency) -> list[BaseRoute]:
    """Routes of all APIs, the most used ones first: they are tried in order."""
    apis: list[tuple[str, ApiAdapter, ApiAdapter | None]] = [
        ("/v1/chat/completions", ChatApi(), None),
        (
            "/v1/responses",
            OpenAiResponsesApi(),
            NativePassthroughApi("responses", OPENAI_RESPONSES, openai_responses_reply.ERROR_FORMAT),
        ),
        (
            "/v1/messages",
            AnthropicApi(),
            NativePassthroughApi("messages", ANTHROPIC_MESSAGES, anthropic_reply.ERROR_FORMAT),
        ),
        ("/v1/completions", CompletionsApi(), None),
        ("/inference/v1/generate", VllmGenerateApi(), None),
        ("/generate", SglangGenerateApi(), None),
    ]
    for version in GEMINI_VERSIONS:
        apis += [
            (f"/{version}/models/{{model:path}}:generateContent", GeminiApi(streams=False), None),
            (f"/{version}/models/{{model:path}}:streamGenerateContent", GeminiApi(streams=True), None),
        ]
    scope_of = context.resolver.idempotency_scope
    endpoints = [(path, idempotency.around(CallEndpoint(context, api, native), scope_of)) for path, api, native in apis]
    return [Route(f"{base}{path}", endpoint, methods=["POST"]) for base in BASES for path, endpoint in endpoints]


def _lookup_routes(models: ModelsApi) -> list[BaseRoute]:
    lookups: list[tuple[str, Lookup, str]] = [
        ("/v1/models", models.models, "GET"),
        ("/v1/models/{model:path}", models.model, "GET"),
        ("/v1/messages/count_tokens", models.count_messages, "POST"),
        ("/v1beta/models", models.gemini_models, "GET"),
        ("/v1beta/models/{model:path}:countTokens", models.count_gemini, "POST"),
        ("/v1/models/{model:path}:countTokens", models.count_gemini, "POST"),
    ]
    return [Route(f"{base}{path}", lookup, methods=[method]) for base in BASES for path, lookup, method in lookups]
