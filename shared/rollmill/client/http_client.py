"""Requests to a capture, by urllib: JSON in, JSON out, retried after capture's ``retry-after``."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError, RetryableError, RollmillError

RETRY_LATER = (429, 503)
"""HTTP statuses with a ``retry-after`` header."""
UNREACHABLE_SECONDS = 1.0
FIRST_SECONDS = 10.0

_log = logging.getLogger(__name__)


class CaptureRefusedError(RollmillError):
    """Capture refused the request; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RetryLaterError(CaptureRefusedError):
    """Refused for now; ``retry_after`` in seconds."""

    retry_after = 1.0


class CaptureUnreachableError(RetryableError):
    """No capture answers."""


@dataclass(frozen=True)
class HttpClient:
    """``patience``: seconds in which to retry; ``seconds``: timeout of one request."""

    url: str
    api_key: str | None = None
    patience: float = 600.0
    seconds: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def post(self, path: str, body: dict[str, Any], *, first: bool = False) -> dict[str, Any]:
        """Raises CaptureRefusedError and CaptureUnreachableError.

        ``first``: nothing of this capture was heard before, so where no one answers the address is probably wrong, and
        only `FIRST_SECONDS` are waited. A capture that admits no more is waited for as long as ``patience`` says.
        """
        began = self.now()
        end = began + self.patience
        reachable_until = min(end, began + FIRST_SECONDS) if first else end
        reported = False
        while True:
            try:
                return self._post(path, body)
            except CaptureRefusedError as error:
                pause = self._pause(error)
                if pause is None or self.now() + pause > end:
                    raise
            except CaptureUnreachableError as error:
                pause = UNREACHABLE_SECONDS
                if self.now() + pause > reachable_until:
                    raise
                if not reported:
                    _log.warning("%s; trying for %.0f s", error, reachable_until - self.now())
                reported = True
            self.sleep(pause)

    def _pause(self, error: CaptureRefusedError) -> float | None:
        """Seconds until the next try; None: no retry, it would be refused again."""
        return error.retry_after if isinstance(error, RetryLaterError) else None

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        address = self.url.rstrip("/") + path
        if not address.startswith(("http://", "https://")):
            raise InvalidInputError(f"{self.url!r} is no address of a capture; give one like http://127.0.0.1:8700")
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)  # noqa: S310  # checked above
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as answer:  # noqa: S310  # checked above
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            raise _refused(error, address) from error
        except OSError as error:
            raise CaptureUnreachableError(
                f"no capture answers at {self.url} ({error}); start one with `rollmill up`, or set ROLLMILL_CAPTURE_URL"
            ) from error
        return found


def _refused(error: urllib.error.HTTPError, address: str) -> CaptureRefusedError:
    raw = error.read().decode("utf-8", "replace")
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:300]
    kind = RetryLaterError if error.code in RETRY_LATER else CaptureRefusedError
    refusal = kind(f"{address} answers {error.code}: {message}", error.code)
    if isinstance(refusal, RetryLaterError):
        refusal.retry_after = _seconds(error.headers.get("retry-after"))
    return refusal


def _seconds(header: str | None) -> float:
    try:
        return float(header or 1.0)
    except ValueError:
        return 1.0
