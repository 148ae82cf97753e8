"""Calls to the engine: one shared client with room for a thousand waiting rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from rollmill.errors import RollmillError
from rollmill_capture.coordination.policies import PausedPolicies
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.connection_pool import PooledTransport
from rollmill_capture.upstream.formats.upstream_format import CHAT
from rollmill_capture.upstream.http_transport import BrokenResponseError, HttpTransport
from rollmill_capture.upstream.load_balancer import LoadBalancer
from rollmill_capture.upstream.model_routes import Target

BAD_GATEWAY = 502
GATEWAY_TIMEOUT = 504

IDLE_SECONDS = 60.0
"""After this an unused connection is closed; engines keep theirs a little longer or much shorter."""

STALE = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""How a pooled connection fails that the server had closed."""

NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)
BUSY = (429, 503)
"""Statuses of an engine that samples nothing for now."""


class UpstreamError(RollmillError):
    """The engine gave no answer, or its answer broke off. ``status`` is what the client is told."""

    def __init__(self, message: str, status: int, *, began: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.began = began
        """The engine had begun to answer: something may have been sampled."""


def make_client(settings: CaptureSettings) -> httpx.AsyncClient:
    """The client for all upstreams; the caller closes it."""
    trusted = httpx.create_ssl_context()
    return httpx.AsyncClient(
        transport=PooledTransport(
            lambda: HttpTransport(trusted), lanes=settings.connections, idle_seconds=IDLE_SECONDS
        ),
        timeout=httpx.Timeout(settings.read_seconds, connect=settings.connect_seconds, pool=settings.connect_seconds),
        trust_env=False,  # the environment's proxies are not for the engine
        follow_redirects=False,
    )


@dataclass(frozen=True)
class Upstream:
    client: httpx.AsyncClient
    pauses: PausedPolicies = field(default_factory=PausedPolicies)
    places: LoadBalancer = field(default_factory=LoadBalancer)

    @asynccontextmanager
    async def chat(
        self, target: Target, body: bytes, request_id: str, path: str = CHAT.path, session_id: str = ""
    ) -> AsyncIterator[httpx.Response]:
        """The engine's response, its body unread. Raises UpstreamError, also inside the block when reading fails.

        Leaving the block early cancels the call upstream. ``session_id``: whose call it is, for its replica.
        """
        began = False
        try:
            response = await self._answer(target, body, request_id, path, session_id)
            began = response.is_success
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise upstream_error(error, target, began=began) from error

    async def post(self, target: Target, path: str, body: bytes) -> httpx.Response:
        """A whole answer to a question beside the calls. Raises UpstreamError."""
        headers = {**_headers(target), "content-type": "application/json"}
        try:
            return await self.client.post(f"{target.root}{path}", content=body, headers=headers)
        except httpx.HTTPError as error:
            raise upstream_error(error, target) from error

    async def _answer(self, target: Target, body: bytes, request_id: str, path: str, session_id: str) -> httpx.Response:
        """Of the session's replica; of the next one where that cannot be reached, or is busy: nothing was sampled."""
        tried: set[str] = set()
        while True:
            root = await self.places.choose(target.replicas, session_id, tried)
            tried.add(root)
            last = len(tried) == len(target.replicas)
            try:
                response = await self._send(self._request(target, body, request_id, f"{root}{path}"))
            except NOT_REACHED:
                self.places.unreachable(root)
                if last:
                    raise
                continue
            if not self._is_busy(root, response) or last:
                return response
            await response.aclose()

    def _is_busy(self, root: str, response: httpx.Response) -> bool:
        if response.status_code in BUSY:
            self.places.busy(root, response.headers.get("retry-after"))
            return True
        self.places.well(root)
        return False

    async def models(self, target: Target) -> httpx.Response:
        """The engine's list of models. Raises UpstreamError."""
        headers = _headers(target)
        try:
            return await self.client.get(f"{target.base_url}/models", headers=headers)
        except httpx.HTTPError as error:
            raise upstream_error(error, target) from error

    def _request(self, target: Target, body: bytes, request_id: str, url: str) -> httpx.Request:
        # An id of our own: a client that retries sends its id twice, and engines refuse one that is running.
        headers = {**_headers(target), "content-type": "application/json", "x-request-id": request_id}
        return self.client.build_request("POST", url, content=body, headers=headers)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """One more try where no byte of an answer came: the pooled connection was closed by the server."""
        try:
            return await self.client.send(request, stream=True)
        except STALE:
            return await self.client.send(request, stream=True)


def _headers(target: Target) -> dict[str, str]:
    # Compression between two processes of one cluster costs more than it saves.
    base = {"accept-encoding": "identity"}
    return base if target.authorization is None else {**base, "authorization": target.authorization}


def upstream_error(error: httpx.HTTPError, target: Target, *, began: bool = False) -> UpstreamError:
    detail = str(error) or type(error).__name__
    began = began or isinstance(error, BrokenResponseError)
    if isinstance(error, httpx.TimeoutException):
        return UpstreamError(
            f"{target.base_url} gave no answer in time ({type(error).__name__})", GATEWAY_TIMEOUT, began=began
        )
    return UpstreamError(f"{target.base_url} cannot be reached, or broke off: {detail}", BAD_GATEWAY, began=began)
