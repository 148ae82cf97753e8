"""What a service outside gets to read of a session. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

import orjson

from rollmill.models import Trace, Trajectory


class Part(StrEnum):
    """Of a session, beside its names and status."""

    OUTPUT = "output"
    MESSAGES = "messages"
    TOKENS = "tokens"
    METADATA = "metadata"


def request_payload(trajectory: Trajectory, parts: Collection[Part]) -> dict[str, Any]:
    """Plain values; arrays are numpy's."""
    spec = trajectory.spec
    told: dict[str, Any] = {
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
    if Part.OUTPUT in parts:
        told["output"] = _json(trajectory.output)
    if Part.METADATA in parts:
        told["metadata"] = spec.metadata
    return told


def _trace(trace: Trace, parts: Collection[Part]) -> dict[str, Any]:
    """Its counts are what trace, turn and token rewards have to fit."""
    told: dict[str, Any] = {
        "turns": len(trace.turns),
        "response_tokens": len(trace.response_ids),
        "finish_reason": trace.finish_reason,
    }
    if Part.MESSAGES in parts:
        for name in ("prompt_messages", "response_messages", "tools"):
            told[name] = _json(getattr(trace, name))
    if Part.TOKENS in parts:
        told |= {"prompt_ids": trace.prompt_ids, "response_ids": trace.response_ids, "loss_mask": trace.loss_mask}
        told["turn_ranges"] = [[turn.start, turn.stop] for turn in trace.turns]
    return told


def _json(value: bytes | None) -> Any:
    return None if value is None else orjson.loads(value)
