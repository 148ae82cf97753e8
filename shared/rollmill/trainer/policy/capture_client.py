"""Client of the captures in front of the engines: pauses and resumes them around a weight update (rule A12)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError, RetryableError
from rollmill.models import PolicyVersion

MODES = ("wait", "keep", "abort_resume")
"""What happens to calls in flight: waited for; kept running; aborted by the engine and continued by capture."""
SPARE_SECONDS = 30.0
"""For the network, on top of what capture itself waits."""


class CaptureUnreachableError(RetryableError):
    """A capture did not carry out a request, and calls may go on through it."""


@dataclass(frozen=True)
class Captures:
    """URLs of all replicas, or of one: a replica passes a pause on to all others, and ``pause`` waits until each has
    applied it. A replica that is listed is also asked directly.
    """

    urls: Sequence[str] = ()
    admin_key: str | None = None

    def pause(self, policy: str, mode: str, seconds: float) -> None:
        """New calls wait from now on. Raises CaptureUnreachableError also where, after ``seconds``, a replica has not
        applied it yet, or, in mode ``wait``, calls are still in flight.
        """
        if mode not in MODES:
            raise InvalidInputError(f"mode {mode!r} is none of {', '.join(MODES)}")
        for url in self.urls:
            answer = self._post(url, policy, "pause", {"mode": mode, "seconds": seconds}, seconds + SPARE_SECONDS)
            awaited = answer.get("replicas_awaited", 0)
            if awaited or (mode == "wait" and answer["in_flight"]):
                raise CaptureUnreachableError(
                    f"after {seconds:g} s {answer['in_flight']} calls of {policy!r} are in flight through {url} "
                    f"and {awaited} other replicas have not applied the pause"
                )

    def resume(self, policy: str, version: PolicyVersion | None, *, cache_reset: bool) -> None:
        """Calls go on. ``version``: what the engines have loaded; None: nothing new. Raises CaptureUnreachableError."""
        body = {"version": None if version is None else list(version), "cache_reset": cache_reset}
        for url in self.urls:
            self._post(url, policy, "resume", body, SPARE_SECONDS)

    def _post(self, url: str, policy: str, verb: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        address = f"{url.rstrip('/')}/admin/policies/{policy}/{verb}"
        if not address.startswith(("http://", "https://")):
            raise InvalidInputError(f"{url!r} is no HTTP address of a capture")
        request = urllib.request.Request(address, json.dumps(body).encode(), self._headers())  # noqa: S310  # checked
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310  # checked above
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode("utf-8", "replace")
            raise CaptureUnreachableError(f"{address} answers {error.code}: {detail}") from error
        except OSError as error:
            raise CaptureUnreachableError(f"{address}: {error}") from error
        return found

    def _headers(self) -> dict[str, str]:
        key = {} if self.admin_key is None else {"authorization": f"Bearer {self.admin_key}"}
        return {"content-type": "application/json", **key}
