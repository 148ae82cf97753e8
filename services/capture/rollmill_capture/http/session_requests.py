"""What callers send to open and close sessions, read with advice where it is wrong. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rollmill.errors import InvalidInputError
from rollmill.models import Identifier, SessionClosed, SessionEntry, SessionOpened, SessionSpec, dump_json

E = TypeVar("E", SessionOpened, SessionClosed)

_NOT_IN_SPEC = ("session_id", "attempt")
_CLOSE_FIELDS = ("status", "error", "output", "reward", "attempt")


@dataclass(frozen=True)
class OpenRequest:
    spec: SessionSpec
    session_id: str | None
    """None: capture chooses one."""
    attempt: int


@dataclass(frozen=True)
class CloseRequest:
    fields: dict[str, Any]
    """Fields of `SessionClosed`, validated."""
    attempt: int | None
    """None: the newest."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the content: it tells a repeated close from a different one."""
        return hashlib.sha256(dump_json(self.fields)).hexdigest()


class UnacknowledgedEvents:
    """Events that were sent and never acknowledged: they may be in the log, so a repeated request sends the same bytes
    again, and the log's readers see a duplicate instead of a conflict (rules S1, T5).
    """

    def __init__(self, max_events: int = 10_000) -> None:
        self._events: dict[str, SessionOpened | SessionClosed] = {}
        self._max_events = max_events

    def sent_before(self, event: E) -> E:
        """The event as it was sent before, where only its time differs; else the event itself."""
        before = self._events.get(event.session_id)
        return before if isinstance(before, type(event)) and before == event.replace(at=before.at) else event

    def keep(self, event: SessionOpened | SessionClosed) -> None:
        self._events[event.session_id] = event
        if len(self._events) > self._max_events:
            del self._events[next(iter(self._events))]

    def forget(self, event: SessionOpened | SessionClosed) -> None:
        self._events.pop(event.session_id, None)


def read_open_request(body: dict[str, Any]) -> OpenRequest:
    """Raises InvalidInputError with advice."""
    fields = [*_NOT_IN_SPEC, *SessionSpec.model_fields]
    _refuse_unknown(body, fields)
    try:
        return OpenRequest(
            spec=SessionSpec.validate_strictly({key: body[key] for key in body if key not in _NOT_IN_SPEC}),
            session_id=_optional(Identifier, body.get("session_id"), "session_id"),
            attempt=_optional(PositiveInt, body.get("attempt"), "attempt") or 1,
        )
    except ValidationError as error:
        raise InvalidInputError(validation_message(error, SessionSpec)) from error


def read_close_request(body: dict[str, Any]) -> CloseRequest:
    """Raises InvalidInputError with advice."""
    _refuse_unknown(body, _CLOSE_FIELDS)
    fields = {key: body[key] for key in _CLOSE_FIELDS if key != "attempt" and body.get(key) is not None}
    try:
        SessionClosed.model_validate({**fields, "session_id": "any"})
    except ValidationError as error:
        raise InvalidInputError(validation_message(error, SessionClosed)) from error
    return CloseRequest(fields, _optional(PositiveInt, body.get("attempt"), "attempt"))


def refuse_large_rewards(rewards: Iterable[float | None], limit: float) -> None:
    """Raises InvalidInputError. One reward out of all proportion would decide the advantages of its whole group."""
    largest = max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    if largest > limit:
        raise InvalidInputError(
            f"a reward of magnitude {largest:g} is above {limit:g}: scale it, or raise ROLLMILL_MAX_REWARD"
        )


def _optional(kind: Any, value: object, name: str) -> Any:
    if value is None:
        return None
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise InvalidInputError(f"{name}: {error.errors()[0]['msg']}") from error


def _refuse_unknown(body: dict[str, Any], fields: Iterable[str]) -> None:
    unknown = sorted(set(body) - set(fields))
    if unknown:
        raise InvalidInputError(_unknown_field(unknown[0], fields))


def _unknown_field(name: str, fields: Iterable[str]) -> str:
    near = get_close_matches(name, list(fields), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
    return f"unknown field {name!r}: {hint}"


def validation_message(error: ValidationError, model: type[BaseModel]) -> str:
    """The first complaints of a validation, each with its place; without the input, which may be large or secret."""
    items = error.errors(include_url=False, include_input=False, include_context=False)[:3]
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or model.__name__}: {_complaint(item, model)}" for item in items
    )


def _complaint(item: ErrorDetails, model: type[BaseModel]) -> str:
    if item["type"] != "extra_forbidden":
        return item["msg"]
    *path, name = item["loc"]
    return _unknown_field(str(name), _model_at(model, path).model_fields)


def _model_at(model: type[BaseModel], path: Iterable[str | int]) -> type[BaseModel]:
    """The model of the field at ``path``; a number is a place in a tuple and changes nothing."""
    for name in path:
        if isinstance(name, str) and name in model.model_fields:
            model = next(_models_in(model.model_fields[name].annotation), model)
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def agent_environment(entry: SessionEntry, summary: Mapping[str, Any], token: str) -> dict[str, str]:
    """What a process needs so that a stock SDK in it talks to capture."""
    task = {} if entry.spec.task_id is None else {"ROLLMILL_TASK_ID": entry.spec.task_id}
    base_url = summary["base_url"]
    address = base_url.removesuffix("/v1")  # other SDKs put the version behind it themselves
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": token,
        "GOOGLE_GEMINI_BASE_URL": address,
        "GEMINI_API_KEY": token,
        "ROLLMILL_SESSION_ID": summary["session_id"],
        **task,
    }
