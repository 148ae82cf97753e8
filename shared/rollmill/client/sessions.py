"""One session: opened at the beginning of a block, closed at its end with the block's result."""

from __future__ import annotations

import asyncio
import uuid
from types import TracebackType
from typing import Any, Self

from rollmill.client.http_client import HttpClient
from rollmill.errors import InvalidInputError
from rollmill.settings import ClientSettings, load

ERROR_LENGTH = 2000


class Session:
    """A context manager, sync and async. Its properties are known once the block has begun."""

    def __init__(self, web: HttpClient, spec: dict[str, Any]) -> None:
        self._web = web
        self._spec = spec
        self._opened: dict[str, Any] | None = None
        self._result: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return str(self._fields["session_id"])

    @property
    def base_url(self) -> str:
        """For any OpenAI SDK."""
        return str(self._fields["base_url"])

    @property
    def api_key(self) -> str:
        """The session's own key; it also names the session."""
        return str(self._fields["api_key"])

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process with an SDK that reads them."""
        return dict(self._fields["environment"])

    def finish(self, *, output: Any = None, reward: float | None = None, error: str | None = None) -> None:
        """Set the result that the session is closed with at the end of the block. ``reward``: for the evaluator
        ``reported``; None is no reward, and never 0.0. ``error``: why it failed.
        """
        given = {"output": output, "reward": reward, "error": error}
        self._result = {name: value for name, value in given.items() if value is not None}

    def open(self) -> None:
        """Raises CaptureRefusedError, after waiting for as long as capture asks to, and CaptureUnreachableError."""
        self._opened = self._web.post("/v1/sessions", self._spec, first=True)

    def close(self) -> None:
        """Close the session. Repeating it with the same content is safe: capture answers again."""
        status = "ERROR" if "error" in self._result else "COMPLETED"
        self._closing_client.post(f"/v1/sessions/{self.id}/close", {"status": status, **self._result})

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record_error(error)
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record_error(error)
        # Also where the block was cancelled: else the session stays open until its deadline.
        await asyncio.shield(asyncio.to_thread(self.close))

    @property
    def _closing_client(self) -> HttpClient:
        """A client with the tenant's key where there is one, else with the session's own, which may close it, too."""
        web = self._web
        return web if web.api_key is not None else HttpClient(web.url, self.api_key, web.patience, web.seconds)

    @property
    def _fields(self) -> dict[str, Any]:
        if self._opened is None:
            raise InvalidInputError(
                "the session is not open yet: use it inside `with rollmill.session(...) as session:`"
            )
        return self._opened

    def _record_error(self, error: BaseException | None) -> None:
        if error is not None:
            self.finish(error=f"{type(error).__name__}: {error}"[:ERROR_LENGTH])


def session(
    task: str | None = None,
    *,
    group: str | None = None,
    group_size: int = 1,
    url: str | None = None,
    api_key: str | None = None,
    patience: float = 600.0,
    **spec: Any,
) -> Session:
    """A session of ``task``, one of ``group_size`` that answer the same prompt.

    ``url``, ``api_key``: of capture; None: ``ROLLMILL_CAPTURE_URL`` and ``ROLLMILL_API_KEY``. ``patience``: seconds to
    wait while capture admits no more; one that does not answer at all is given ten. ``spec``: the other fields of
    `rollmill.models.SessionSpec`, and ``session_id``.
    """
    settings = load(ClientSettings)
    key = api_key if api_key is not None else settings.key
    # The client chooses the id, so that a repeated request opens no second session when an answer was lost.
    given = {"session_id": uuid.uuid4().hex, "task_id": task, "group_id": group, "group_size": group_size}
    fields = {name: value for name, value in given.items() if value is not None}
    return Session(HttpClient(url or settings.capture_url, key, patience), {**fields, **spec})


def reward(
    session_id: str,
    value: float | None = None,
    *,
    url: str | None = None,
    api_key: str | None = None,
    patience: float = 60.0,
    **fields: Any,
) -> str:
    """Grade a session that may be open or closed; returns the id of the evaluation.

    ``fields``: of `rollmill.models.EvalResult`, and ``evaluator``, ``evaluation_id``, ``supersedes``, ``attempt``.
    Sending the same again changes nothing; a revised reward names the evaluation that it ``supersedes``. ``api_key``
    is the tenant's. Raises CaptureRefusedError and CaptureUnreachableError.
    """
    settings = load(ClientSettings)
    web = HttpClient(url or settings.capture_url, api_key if api_key is not None else settings.key, patience)
    body = fields if value is None else {"reward": value, **fields}
    return str(web.post(f"/v1/sessions/{session_id}/reward", body, first=True)["evaluation_id"])
