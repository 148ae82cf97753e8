"""One request to an outside service, and the reason that its failure has."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_network
from typing import Any, Self

import httpx
from pydantic import Field, model_validator

from rollmill.errors import InfrastructureError, NotGradedError
from rollmill.models import Record
from rollmill.signing import ANSWER_HEADER, HEADER, sign, verify_answer
from rollmill.strategies import EvaluationContext
from rollmill.strategies.services import ExternalService
from rollmill_evaluator.remote.addresses import SERVICE_UNREACHABLE, AddressRule

UNKNOWN_SERVICE = "unknown_service"
URL_NOT_ALLOWED = "url_not_allowed"
SERVICE_TIMEOUT = "service_timeout"
SERVICE_UNAVAILABLE = "service_unavailable"
SERVICE_REFUSED = "service_refused"
SERVICE_SIGNATURE = "service_signature"
INVALID_ANSWER = "invalid_answer"

TRANSIENT_STATUSES = (408, 425, 429)
SERVER_ERRORS = 500
ANSWER_BYTES = 4 * 2**20
REFUSAL_CHARACTERS = 500
"""Characters of a refusal's body that are kept."""


class ServiceReference(Record):
    """The service that a config refers to: ``service``, a name in the evaluator's settings, or ``url``."""

    service: str | None = None
    url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Of one try."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.service is None) == (self.url is None):
            raise ValueError("give either `service`, a name from ROLLMILL_EVALUATOR_SERVICES, or `url`")
        return self

    def resolve(self, context: EvaluationContext) -> ExternalService:
        """Raises NotGradedError (``unknown_service``, ``url_not_allowed``)."""
        if self.url is not None:
            return _unnamed_service(self.url, allowed=context.any_url)
        found = context.services.get(self.service or "")
        if found is None:
            known = ", ".join(sorted(context.services)) or "none"
            detail = f"{self.service!r} is not in ROLLMILL_EVALUATOR_SERVICES, which has: {known}"
            raise NotGradedError(UNKNOWN_SERVICE, detail)
        return found

    def address_rule(self, context: EvaluationContext) -> AddressRule | None:
        """For a ``url``; None: an operator named the service, wherever it is."""
        return None if self.url is None else AddressRule(tuple(map(ip_network, context.networks)))


def _unnamed_service(url: str, *, allowed: bool) -> ExternalService:
    if not allowed:
        raise NotGradedError(URL_NOT_ALLOWED, "a spec must name a service: ROLLMILL_EVALUATOR_ANY_URL is false")
    return ExternalService(url)


@dataclass(frozen=True)
class HttpRequest:
    """A request, ready to be sent."""

    service: ExternalService
    body: bytes
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    signed_answer: bool = False
    """True: an answer without a valid signature is refused."""
    rule: AddressRule | None = None
    """Which addresses the service may have; None: any, because an operator named it."""

    async def send(self, seconds: float) -> bytes:
        """The answer's body. Raises InfrastructureError where a later try may succeed, else NotGradedError."""
        signature = self._signature()
        headers = {"content-type": "application/json", **self._auth_headers(signature), **self.headers}
        try:
            async with (
                asyncio.timeout(seconds),
                http_client(seconds) as client,
                client.stream("POST", content=self.body, **await self._destination(headers)) as response,
            ):
                body = await _read_bounded(response)
        except TimeoutError as error:
            raise InfrastructureError(SERVICE_TIMEOUT, f"no answer within {seconds:.3g} s") from error
        except httpx.TimeoutException as error:
            raise InfrastructureError(SERVICE_TIMEOUT, f"no answer within {seconds:.3g} s") from error
        except httpx.TransportError as error:
            raise InfrastructureError(SERVICE_UNREACHABLE, repr(error)) from error
        except httpx.InvalidURL as error:
            raise NotGradedError(SERVICE_REFUSED, str(error)) from error
        _raise_failure(response, body)
        self._verify_signature(signature, response, body)
        return body

    async def _destination(self, headers: dict[str, str]) -> dict[str, Any]:
        """URL, headers and TLS name. Where there is a rule the URL has the address that was checked, so that no second
        look-up can give another one.
        """
        url = httpx.URL(self.service.url.rstrip("/") + self.path)
        if self.rule is None:
            return {"url": url, "headers": headers}
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self.rule.allowed_address(url.host, port)
        return {
            "url": url.copy_with(host=address),
            "headers": {**headers, "host": url.netloc.decode()},
            "extensions": {"sni_hostname": url.host},
        }

    def _signature(self) -> str | None:
        key = self.service.signing_key
        return None if key is None else sign(key, self.body, time.time())

    def _auth_headers(self, signature: str | None) -> dict[str, str]:
        key = self.service.api_key
        found = {"authorization": f"Bearer {key}"} if key is not None else {}
        return found if signature is None else {**found, HEADER: signature}

    def _verify_signature(self, signature: str | None, response: httpx.Response, body: bytes) -> None:
        if not self.signed_answer:
            return
        key, given = self.service.signing_key, response.headers.get(ANSWER_HEADER, "")
        if key is None or signature is None:
            raise NotGradedError(SERVICE_SIGNATURE, "answers have to be signed, and the service has no signing_key")
        if not verify_answer(key, signature, body, given):
            raise NotGradedError(SERVICE_SIGNATURE, "the answer's signature is missing or wrong")


def http_client(seconds: float) -> httpx.AsyncClient:
    """A client for one request. It ignores the proxies of the environment: a spec chooses the address."""
    return httpx.AsyncClient(timeout=seconds, verify=_tls(), trust_env=False)


@cache
def _tls() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than a request."""
    return ssl.create_default_context()


async def _read_bounded(response: httpx.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > ANSWER_BYTES:
            raise NotGradedError(INVALID_ANSWER, f"the answer is larger than {ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _raise_failure(response: httpx.Response, body: bytes) -> None:
    status = response.status_code
    if response.is_success:
        return
    detail = f"HTTP {status}: {body[:REFUSAL_CHARACTERS].decode('utf-8', 'replace')}"
    if status >= SERVER_ERRORS or status in TRANSIENT_STATUSES:
        raise InfrastructureError(
            SERVICE_UNAVAILABLE, detail, retry_after=_retry_after(response.headers.get("retry-after"))
        )
    raise NotGradedError(SERVICE_REFUSED, detail)


def _retry_after(header: str | None) -> float | None:
    """Seconds; None: the header is absent, or is a date."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
