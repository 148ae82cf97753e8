"""The JSON object that an outside service is sent of a session. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

import orjson

from rollmill.models import Trace, Trajectory


class SessionPart(StrEnum):
    """Optional parts of a session, beside its names and status."""

    OUTPUT = "output"
    MESSAGES = "messages"
    TOKENS = "tokens"
    METADATA = "metadata"


def request_payload(trajectory: Trajectory, parts: Collection[SessionPart]) -> dict[str, Any]:
    """Plain values, arrays as NumPy arrays."""
    spec = trajectory.spec
    payload: dict[str, Any] = {
        "session_id": trajectory.session_id,
        "attempt": trajectory.attempt,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "task_id": spec.task_id,
        "group_id": trajectory.group_id,
        "dataset": spec.dataset,
        "purpose": spec.purpose.value,
        "traces": [_trace(trace, parts) for trace in trajectory.traces],
    }
    if SessionPart.OUTPUT in parts:
        payload["output"] = _json(trajectory.output)
    if SessionPart.METADATA in parts:
        payload["metadata"] = spec.metadata
    return payload


def _trace(trace: Trace, parts: Collection[SessionPart]) -> dict[str, Any]:
    """Rewards of turns and tokens have to match the counts ``turns`` and ``response_tokens``."""
    payload: dict[str, Any] = {
        "turns": len(trace.turns),
        "response_tokens": len(trace.response_ids),
        "finish_reason": trace.finish_reason,
    }
    if SessionPart.MESSAGES in parts:
        for name in ("prompt_messages", "response_messages", "tools"):
            payload[name] = _json(getattr(trace, name))
    if SessionPart.TOKENS in parts:
        payload |= {"prompt_ids": trace.prompt_ids, "response_ids": trace.response_ids, "loss_mask": trace.loss_mask}
        payload["turn_ranges"] = [[turn.start, turn.stop] for turn in trace.turns]
    return payload


def _json(value: bytes | None) -> Any:
    return None if value is None else orjson.loads(value)
