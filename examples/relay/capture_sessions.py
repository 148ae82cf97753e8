"""Sessions at a capture service, over its HTTP API."""

from dataclasses import dataclass
from typing import Any

import httpx

from relay.agents import Session, Transcript
from relay.sabotage import Sabotage

EVALUATOR = "relay.evaluator:RelayEvaluator"


@dataclass(frozen=True)
class CaptureSessions:
    """`relay.agents.Sessions` by HTTP. ``http`` has capture's address as its base URL.

    Both methods raise `httpx.HTTPError` where capture refuses: a run whose sessions are not recorded is no run.
    """

    http: httpx.AsyncClient
    group_size: int
    sabotage: Sabotage = Sabotage.NONE

    async def open(self, group: str, digits: str) -> Session:
        opened = await self._post("/v1/sessions", self._spec(group, digits))
        return Session(opened["session_id"], opened["base_url"], opened["api_key"])

    async def close(self, session: Session, transcript: Transcript) -> None:
        failed = {"error": transcript.error} if transcript.error is not None else {}
        status = {"status": "ERROR" if failed else "COMPLETED", **failed}
        await self._post(f"/v1/sessions/{session.session_id}/close", status)

    def _spec(self, group: str, digits: str) -> dict[str, Any]:
        grader = {"digits": digits, "sabotage": self.sabotage.value}
        return {
            "task_id": f"relay/{digits}",
            "group_id": group,
            "group_size": self.group_size,
            "builder": {"strategy": "prefix_merging"},
            "evaluators": [{"strategy": EVALUATOR, "config": grader}],
        }

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        if answer.is_error:
            raise httpx.HTTPStatusError(
                f"capture answers {answer.status_code} to {path}: {answer.text}",
                request=answer.request,
                response=answer,
            )
        found: dict[str, Any] = answer.json()
        return found
