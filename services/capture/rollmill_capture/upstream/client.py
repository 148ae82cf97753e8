"""Calls to the engines: a model's name gives the target, the session one of its replicas, the client makes the call.

A session's calls go to the same replica as long as it is healthy: the order of its replicas is by rendezvous hashing,
so that its prefix cache is found again, and a replica that comes or goes moves no other session. A replica that is busy
or cannot be reached gets no calls for a while. One HTTP client, with room for a thousand waiting rollouts, serves all.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog

from rollmill.errors import RollmillError
from rollmill_capture.bodies import DecodingTransport, read_whole
from rollmill_capture.coordination.policies import PausedPolicies
from rollmill_capture.model_config import Route, with_scheme
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.formats.upstream_format import CHAT
from rollmill_capture.upstream.http_transport import BrokenResponseError, HttpTransport, PooledTransport

BAD_GATEWAY = 502
GATEWAY_TIMEOUT = 504
IDLE_SECONDS = 60.0
"""After this an unused connection is closed; engines keep theirs a little longer or much shorter."""
FIRST_REST_SECONDS = 0.5
"""Without calls after a failure; doubled by each failure that follows."""
UNREACHABLE_SECONDS = 15.0
"""Longest rest of a replica that cannot be reached."""
STALE = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""How a pooled connection fails that the server had closed."""
NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)
BUSY = (429, 503)
"""Statuses of an engine that samples nothing for now."""


class UpstreamError(RollmillError):
    """The engine gave no answer, or its answer broke off. ``status`` is what the client gets."""

    def __init__(self, message: str, status: int, *, began: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.began = began
        """The engine had begun to answer: something may have been sampled."""


@dataclass(frozen=True)
class Target:
    """A route, and where exactly its calls go."""

    route: Route
    base_url: str
    """Ends with ``/v1``."""
    authorization: str | None
    """Value of the header for the upstream; None: it requires none."""
    others: tuple[str, ...] = ()
    """Roots of further replicas."""

    @property
    def replicas(self) -> tuple[str, ...]:
        """Roots of all replicas."""
        return (self.root, *self.others)

    @property
    def root(self) -> str:
        """The base URL without ``/v1``."""
        return self.base_url.removesuffix("/v1")


class RouteTable:
    """Model names to targets, with the defaults of the settings filled in once."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._default = self._target(settings.default_route)
        self._targets = {model: self._target(route) for model, route in settings.routes.items()}

    @property
    def trained(self) -> tuple[Target, ...]:
        """Where calls that can be trained go."""
        return tuple(target for target in (self._default, *self._targets.values()) if target.route.trainable)

    def find(self, model: str | None) -> Target:
        """The target of a model name as the client gives it; None is a request without one."""
        return self._default if model is None else self._targets.get(model, self._default)

    def _target(self, route: Route) -> Target:
        key = route.api_key or self._settings.upstream_api_key
        first, *others = [_root(url) for url in (route.upstream or self._settings.upstream, *route.replicas)]
        bearer = None if key is None else f"Bearer {key.get_secret_value()}"
        return Target(route, f"{first}/v1", bearer, tuple(others))


@dataclass
class _Health:
    failures: int = 0
    until: float = 0.0
    """No calls before this time of the load balancer's clock."""
    busy: bool = False
    """It asked for the rest itself; calls wait for its end, where there is no other replica."""


class LoadBalancer:
    """``seconds``: longest rest that a busy replica is given, whatever it asks for."""

    def __init__(self, seconds: float = 30.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._health: dict[str, _Health] = {}

    async def select(self, urls: Sequence[str], session_id: str, tried: Collection[str] = ()) -> str:
        """The replica for a call: the session's first that is healthy, else the one that will be so soonest; a busy one
        is waited for. ``tried``: those that this call has failed at.
        """
        left = [url for url in replica_order(urls, session_id) if url not in tried]
        healthy = next((url for url in left if self._of(url).until <= self._now()), None)
        if healthy is not None:
            return healthy
        soonest = min(left, key=lambda url: self._of(url).until)
        if self._of(soonest).busy:
            await asyncio.sleep(self._of(soonest).until - self._now())
        return soonest

    def mark_healthy(self, url: str) -> None:
        """It has answered."""
        health = self._health.pop(url, None)
        if health is not None and health.failures:
            structlog.get_logger().info("an upstream is healthy again and gets calls", upstream=url)

    def mark_rate_limited(self, url: str, retry_after: str | None) -> None:
        """It asks for a rest, of the length in the header ``retry-after``."""
        health = self._failed(url)
        rest = _rest(health) if retry_after is None else _seconds(retry_after)
        health.until, health.busy = self._now() + min(rest, self._seconds), True

    def mark_down(self, url: str) -> None:
        """It cannot be reached."""
        health = self._failed(url)
        health.until, health.busy = self._now() + min(_rest(health), UNREACHABLE_SECONDS), False

    def _failed(self, url: str) -> _Health:
        health = self._health.setdefault(url, _Health())
        health.failures += 1
        if health.failures == 1:
            structlog.get_logger().warning("an upstream is busy or down and gets no calls for a while", upstream=url)
        return health

    def _of(self, url: str) -> _Health:
        return self._health.get(url, _Health())


@dataclass(frozen=True)
class Upstream:
    """Makes the calls. ``pauses``: entered by the caller around each call of a policy."""

    client: httpx.AsyncClient
    pauses: PausedPolicies = field(default_factory=PausedPolicies)
    load_balancer: LoadBalancer = field(default_factory=LoadBalancer)
    reply_bytes: int = 64 * 2**20
    """Of a whole reply, decoded."""

    async def read(self, response: httpx.Response) -> bytes:
        """The body. Raises httpx.HTTPError, also where it is too large."""
        return await read_whole(response, self.reply_bytes)

    @asynccontextmanager
    async def chat(
        self, target: Target, body: bytes, request_id: str, path: str = CHAT.path, session_id: str = ""
    ) -> AsyncIterator[httpx.Response]:
        """The engine's response, its body unread. Raises UpstreamError, also inside the block when reading fails.

        Leaving the block early cancels the call upstream. ``session_id``: of the call, for its replica.
        """
        began = False
        try:
            response = await self._respond(target, body, request_id, path, session_id)
            began = response.is_success
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise upstream_error(error, target, began=began) from error

    async def post(self, target: Target, path: str, body: bytes) -> httpx.Response:
        """A whole answer to a request that samples nothing. Raises UpstreamError."""
        headers = {**_headers(target), "content-type": "application/json"}
        return await self._whole(target, "POST", f"{target.root}{path}", content=body, headers=headers)

    async def models(self, target: Target) -> httpx.Response:
        """The engine's list of models. Raises UpstreamError."""
        return await self._whole(target, "GET", f"{target.base_url}/models", headers=_headers(target))

    async def _whole(self, target: Target, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            async with self.client.stream(method, url, **request) as response:
                return httpx.Response(response.status_code, content=await self.read(response))
        except httpx.HTTPError as error:
            raise upstream_error(error, target) from error

    async def _respond(
        self, target: Target, body: bytes, request_id: str, path: str, session_id: str
    ) -> httpx.Response:
        """Of the session's replica; of the next one where that cannot be reached, or is busy: nothing was sampled."""
        # An id of our own: a client that retries sends its id twice, and engines refuse one that is running.
        headers = {**_headers(target), "content-type": "application/json", "x-request-id": request_id}
        tried: set[str] = set()
        while True:
            root = await self.load_balancer.select(target.replicas, session_id, tried)
            tried.add(root)
            last = len(tried) == len(target.replicas)
            try:
                response = await self._send(
                    self.client.build_request("POST", f"{root}{path}", content=body, headers=headers)
                )
            except NOT_REACHED:
                self.load_balancer.mark_down(root)
                if last:
                    raise
                continue
            if not self._is_busy(root, response) or last:
                return response
            await response.aclose()

    def _is_busy(self, root: str, response: httpx.Response) -> bool:
        if response.status_code in BUSY:
            self.load_balancer.mark_rate_limited(root, response.headers.get("retry-after"))
            return True
        self.load_balancer.mark_healthy(root)
        return False

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """One more try where no byte of an answer came: the pooled connection was closed by the server."""
        try:
            return await self.client.send(request, stream=True)
        except STALE:
            return await self.client.send(request, stream=True)


def make_client(settings: CaptureSettings) -> httpx.AsyncClient:
    """The client for all upstreams; the caller closes it."""
    trusted = httpx.create_ssl_context()
    pool = PooledTransport(
        lambda: HttpTransport(trusted), max_connections=settings.connections, idle_seconds=IDLE_SECONDS
    )
    return httpx.AsyncClient(
        transport=DecodingTransport(pool),
        timeout=httpx.Timeout(settings.read_seconds, connect=settings.connect_seconds, pool=settings.connect_seconds),
        trust_env=False,  # the environment's proxies are not for the engine
        follow_redirects=False,
    )


def replica_order(urls: Sequence[str], session_id: str) -> list[str]:
    """All replicas, the session's own first."""
    if len(urls) == 1:
        return list(urls)
    return sorted(urls, key=lambda url: hashlib.blake2b(f"{session_id} {url}".encode(), digest_size=8).digest())


def upstream_error(error: httpx.HTTPError, target: Target, *, began: bool = False) -> UpstreamError:
    detail, began = str(error) or type(error).__name__, began or isinstance(error, BrokenResponseError)
    status, failed = BAD_GATEWAY, f"cannot be reached, or broke off: {detail}"
    if isinstance(error, httpx.TimeoutException):
        status, failed = GATEWAY_TIMEOUT, f"gave no answer in time ({type(error).__name__})"
    if isinstance(error, httpx.DecodingError):
        failed = f"gave no usable answer: {detail}"
    return UpstreamError(f"{target.base_url} {failed}", status, began=began)


def _root(url: str) -> str:
    return with_scheme(url).rstrip("/").removesuffix("/v1")


def _headers(target: Target) -> dict[str, str]:
    # Compression between two processes of one cluster costs more than it saves.
    base = {"accept-encoding": "identity"}
    return base if target.authorization is None else {**base, "authorization": target.authorization}


def _rest(health: _Health) -> float:
    return FIRST_REST_SECONDS * 2.0 ** min(health.failures - 1, 10)


def _seconds(retry_after: str) -> float:
    """A number of seconds; a date, which no engine sends, or what is no number counts as one second."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return 1.0
    return 1.0 if math.isnan(seconds) else max(seconds, 0.0)
