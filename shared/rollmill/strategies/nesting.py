"""Bounds how evaluators are nested in each other, before any is constructed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.models import StrategySpec

MAX_DEPTH = 8
"""Evaluators within evaluators: each level is constructed and run by the one above, on one stack."""
MAX_EVALUATORS = 256
"""Of one session, with all that they are made of: parts run at the same time, and the reward-merger keeps as many
evaluations of a session."""


def check_nesting(evaluators: Iterable[StrategySpec | Mapping[str, Any]]) -> None:
    """``evaluators``: specs, or their JSON as a config's ``parts`` hold it. Raises InvalidInputError over a bound."""
    level: list[Any] = list(evaluators)
    total, depth = len(level), 1
    while level:
        if total > MAX_EVALUATORS:
            raise InvalidInputError(f"more than {MAX_EVALUATORS} evaluators, parts included: name fewer")
        if depth > MAX_DEPTH:
            raise InvalidInputError(f"evaluators are nested more than {MAX_DEPTH} deep: use fewer levels of parts")
        level = [part for evaluator in level for part in _parts_of(evaluator)]
        total, depth = total + len(level), depth + 1


def _parts_of(evaluator: Any) -> list[Any]:
    config = evaluator.config if isinstance(evaluator, StrategySpec) else _field(evaluator, "config")
    parts = _field(config, "parts")
    return list(parts) if isinstance(parts, list | tuple) else []


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
